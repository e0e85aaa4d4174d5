"""evener report and evener watch from the command line."""

import json

import pytest

from evener.cli import main as cli
from evener.core.claim import CLAIM
from tests.unit.report.page.runs import run_folder


def run_verb(*args: str, capsys) -> tuple[int, dict, str]:
    with pytest.raises(SystemExit) as end:
        cli.main([*args, "--json"])
    out, err = capsys.readouterr()
    return end.value.code, json.loads(out.splitlines()[-1]), err


def test_report_writes_one_file(tmp_path, capsys) -> None:
    run, other = run_folder(tmp_path / "run"), run_folder(tmp_path / "other")
    target = tmp_path / "out" / "page.html"
    code, told, err = run_verb("report", str(run), "-o", str(target), "--compare", str(other), capsys=capsys)
    assert code == 0 and told["figures"]["step_s"] == 1.2 and told["file"] == str(target)
    assert target.stat().st_size == told["bytes"] and "opens in any browser" in err
    assert run_verb("report", str(run), capsys=capsys)[0] == 0 and (run / "report.html").is_file()


def test_report_of_no_run_is_an_error(tmp_path, capsys) -> None:
    code, told, _ = run_verb("report", str(tmp_path), capsys=capsys)
    assert code == 2 and told["error"]["code"] == "EV101"


def test_a_linked_report_is_replaced_not_followed(tmp_path, capsys) -> None:
    run = run_folder(tmp_path / "run")
    outside = tmp_path / "outside"
    outside.write_text("mine")
    (run / "report.html").symlink_to(outside)
    assert run_verb("report", str(run), capsys=capsys)[0] == 0
    assert outside.read_text() == "mine" and not (run / "report.html").is_symlink()


def test_watch_shows_a_run_to_its_end(tmp_path, capsys) -> None:
    code, told, err = run_verb("watch", str(run_folder(tmp_path / "run")), capsys=capsys)
    assert code == 0 and told["steps"] == 10 and told["figures"]["loss"] == pytest.approx(4.6)
    assert "step 1/20" in err and "loss" in err


def test_watch_serves_meanwhile(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.delenv("EVENER_TOKEN", raising=False)
    code, _, err = run_verb("watch", str(run_folder(tmp_path / "run")), "--serve", capsys=capsys)
    assert code == 0 and "live view: http://127.0.0.1:" in err


def test_watch_says_that_a_run_has_ended_which_never_had_a_plan(tmp_path, capsys) -> None:
    (tmp_path / CLAIM).touch()
    code, told, _ = run_verb("watch", str(tmp_path), capsys=capsys)
    assert code == 2 and "has ended, and had no plan" in told["error"]["what"]


def test_watch_says_that_a_run_has_ended_without_a_report(tmp_path, capsys) -> None:
    run = run_folder(tmp_path / "run")
    (run / "report.json").unlink()
    (run / CLAIM).touch()
    code, told, err = run_verb("watch", str(run), capsys=capsys)
    assert code == 0 and told["steps"] == 10 and "has ended without a report" in err
