import json
from pathlib import Path

import typer
from typer.testing import CliRunner

from evener.cli.env import env
from evener.core.files import write
from evener.core.host import Card, HostFacts
from evener.errors import UnknownNameError, UsageError

ROOT = Path(__file__).parents[3]


def run(*arguments):
    app = typer.Typer()
    app.command()(env)
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_kinds_give_a_folder_for_each_build(tmp_path):
    result = run("--kinds", "GTX 1080, RTX 5090,cpu", "-o", tmp_path / "out", "--json")
    assert result.exit_code == 0
    written = sorted(p.relative_to(tmp_path / "out").as_posix() for p in (tmp_path / "out").rglob("*.*"))
    assert written == [
        "cu126/environment.yml",
        "cu126/requirements.txt",
        "cu129/environment.yml",
        "cu129/requirements.txt",
    ]
    assert (tmp_path / "out" / "cu129" / "Dockerfile").read_text().startswith("# torch==2.13.0+cu129 for")
    last = json.loads(result.stdout.splitlines()[-1])
    assert [e["variant"] for e in last["environments"]] == ["cu129", "cu126"]
    assert "one job needs 2 builds of torch" in result.stdout and "Gloo" in result.stdout


def test_a_fleet_gives_its_devices():
    result = run("--fleet", ROOT / "examples" / "fleets" / "by-kind" / "home.json", "--json")
    assert result.exit_code == 0
    (found,) = json.loads(result.stdout.splitlines()[-1])["environments"]
    assert found["variant"] == "cu126"
    assert {n["name"]: n["arch"] for n in found["needs"]}["lab2/gpu0"] == "sm_61"
    assert "one build serves all devices" in result.stdout


def test_hosts_that_were_looked_at(tmp_path):
    file = tmp_path / "lab1.json"
    write(
        file, HostFacts(host="lab1", cards=(Card(kind="AMD", vendor="amd", arch="gfx1100", torch_index=0),))
    )
    result = run(file)
    assert result.exit_code == 0
    assert (
        "rocm7.2: torch==2.13.0+rocm7.2" in result.stdout and "lab1/gpu0 (gfx1100, x86_64)" in result.stdout
    )
    assert "not written: name a folder with -o" in result.stdout


def test_this_host_by_default(monkeypatch):
    monkeypatch.setattr("evener.probing.host.look", lambda **given: HostFacts(host="here"))
    result = run()
    assert result.exit_code == 0 and "here/cpu" in result.stdout


def test_one_way_to_say_it(tmp_path):
    result = run("--kinds", "cpu", "--fleet", tmp_path / "x.json")
    assert isinstance(result.exception, UsageError)


def test_an_unknown_kind():
    assert isinstance(run("--kinds", "RTX 9999").exception, UnknownNameError)
