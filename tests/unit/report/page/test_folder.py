"""A run's folder is read as a stranger's: nothing outside is reached, nothing waited for, all is bounded."""

import os

import msgspec
import pytest

from evener.core.files import write
from evener.errors import FileError
from evener.report.page import folder as reading
from evener.report.page.build import document
from evener.report.page.files import read_run
from evener.report.page.folder import Folder
from tests.unit.report.page.runs import run_folder
from tests.unit.report.worked import PLAN, RECORDS, record

SECRET = "what another file holds"


def test_a_complete_run_is_read_without_a_remark(tmp_path) -> None:
    run = read_run(run_folder(tmp_path / "run"))
    assert run.problems == ()
    assert (run.name, run.plan, run.records) == ("run", PLAN, RECORDS)
    assert run.ending.report.step_s == 1.2 and run.ending.decisions
    assert len(run.traces) == 1 and run.fleet is not None


@pytest.mark.parametrize("name", ["report.json", "trace.json", "fleet.json", "run.json", "metrics.jsonl"])
def test_a_link_is_not_followed(tmp_path, name: str) -> None:
    path = run_folder(tmp_path / "run")
    outside = tmp_path / "outside"
    outside.write_text(SECRET)
    (path / name).unlink()
    (path / name).symlink_to(outside)
    run = read_run(path)
    assert [p for p in run.problems if name in p]
    assert SECRET not in str(run)


def test_a_linked_plan_is_refused(tmp_path) -> None:
    path = run_folder(tmp_path / "run")
    (path / "plan.json").rename(tmp_path / "plan.json")
    (path / "plan.json").symlink_to(tmp_path / "plan.json")
    with pytest.raises(FileError, match=r"plan\.json was not read"):
        read_run(path)


def test_a_pipe_is_not_waited_for(tmp_path) -> None:
    path = run_folder(tmp_path / "run")
    (path / "trace.json").unlink()
    os.mkfifo(path / "trace.json")
    assert any("no plain file" in p for p in read_run(path).problems)


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "model.safetensors", "plan.json/../x", ""])
def test_only_the_files_of_a_run_are_opened(tmp_path, name: str) -> None:
    with pytest.raises(FileError, match="no file of a run"):
        Folder(run_folder(tmp_path / "run")).read(name)


def test_a_file_that_is_too_large_is_not_read(tmp_path, monkeypatch) -> None:
    path = run_folder(tmp_path / "run")
    monkeypatch.setitem(reading.LIMITS, "trace.json", 100)
    run = read_run(path)
    assert run.traces == () and any("trace.json" in p and "bytes" in p for p in run.problems)


def test_of_a_long_run_the_newest_steps_are_read(tmp_path, monkeypatch) -> None:
    path = run_folder(tmp_path / "run")
    whole = (path / "metrics.jsonl").stat().st_size
    monkeypatch.setitem(reading.LIMITS, "metrics.jsonl", whole // 2)
    run = read_run(path)
    assert run.records == RECORDS[-len(run.records) :] and 3 <= len(run.records) <= 5
    assert any("only the newest" in p for p in run.problems)


def test_lines_that_are_no_records_are_counted(tmp_path) -> None:
    path = run_folder(tmp_path / "run")
    with (path / "metrics.jsonl").open("ab") as f:
        f.write(b'{"step": 1}\n' + b"[" * 100_000 + b"\n\xff\xfe\n" + b'{"step":11,"samp')
    run = read_run(path)
    assert run.records == RECORDS
    assert any("3 lines of metrics.jsonl" in p for p in run.problems)


@pytest.mark.parametrize(
    "raw",
    [b"[" * 500_000, b"\xff", b"{}", b"null", b'{"efficiency": "high"}', b'{"decisions": [1, 2]}'],
    ids=["deep", "not text", "empty", "null", "of other types", "decisions of other types"],
)
def test_a_report_that_is_none_is_told_and_left_out(tmp_path, raw: bytes) -> None:
    path = run_folder(tmp_path / "run")
    (path / "report.json").write_bytes(raw)
    run = read_run(path)
    shown = document(run)
    assert shown.stats and shown.plan.devices
    assert raw == b"{}" or any("report.json" in p for p in run.problems)


def test_a_plan_of_billions_of_micro_batches_is_refused(tmp_path) -> None:
    path = run_folder(tmp_path / "run")
    plan = msgspec.to_builtins(PLAN)
    plan["pipelines"][0]["samples"] += 10**10
    plan["global_batch"] += 10**10
    write(path / "plan.json", plan)
    with pytest.raises(FileError, match="micro-batches"):
        read_run(path)


def test_names_that_command_a_terminal_are_refused_in_plans_and_replaced_in_sentences(tmp_path) -> None:
    path = run_folder(tmp_path / "run", records=(*RECORDS, record(10, skipped="\x1b[2Jgone\u202e")))
    assert read_run(path).records[-1].skipped == "\N{REPLACEMENT CHARACTER}[2Jgone\N{REPLACEMENT CHARACTER}"
    text = (path / "plan.json").read_text().replace("lab/a", "lab/\\u001b[2J")
    (path / "plan.json").write_text(text)
    with pytest.raises(FileError, match="cannot be printed"):
        read_run(path)


def test_files_that_do_not_belong_together_still_give_a_page(tmp_path) -> None:
    path = run_folder(tmp_path / "run")
    text = (path / "report.json").read_text().replace("lab/a", "another/a")
    (path / "report.json").write_text(text)
    shown = document(read_run(path))
    assert shown.plan.devices == (*PLAN.devices, "lab/old") and shown.curves.step


def test_what_is_no_folder_is_an_error(tmp_path) -> None:
    with pytest.raises(FileError, match="no folder of a run"):
        read_run(tmp_path / "nothing")
    with pytest.raises(FileError, match=r"no plan\.json"):
        read_run(tmp_path)
