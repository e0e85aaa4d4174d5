import json

import pytest
import typer
from typer.testing import CliRunner

from evener.cli.probe import probe
from evener.core.figures import Figure, line
from evener.core.files import read, write
from evener.core.fleet import Device, Fleet, Link
from evener.errors import UnknownNameError, UsageError
from evener.probing import joining

FLEET = Fleet(
    devices=(
        Device(
            name="lab1/cpu",
            kind="CPU (2 threads)",
            flops={"float32": Figure(value=3e11, source="measured", spread=0.07)},
        ),
    ),
    links=(Link(a="lab1", b="lab1", curve=line(1e-4, 1e9)),),
    note="cpu: float16 left out; 14 rounds",
)


@pytest.fixture
def asked(monkeypatch):
    """What the measurement was asked for, in place of measuring."""
    asked = {}

    def measure(**given):
        asked.update(given)
        return FLEET

    monkeypatch.setattr("evener.probing.probe", measure)
    return asked


def run(*arguments):
    app = typer.Typer()
    app.command()(probe)
    return CliRunner().invoke(app, arguments)


def test_the_fleet_is_written_and_told(asked, tmp_path):
    file = tmp_path / "fleet.json"
    result = run("-o", str(file), "--json")
    assert result.exit_code == 0
    assert read(file, Fleet) == FLEET
    last = json.loads(result.stdout.splitlines()[-1])
    assert last["output"] == str(file)
    assert last["fleet"]["devices"][0]["flops"]["float32"]["value"] == 3e11
    assert result.stdout.count("\n") == 1  # what people read goes to standard error
    assert "float32 300 GFLOP/s ±7%" in " ".join(result.stderr.split())
    assert "cpu: float16 left out" in result.stderr
    assert asked == {"host": None, "devices": None, "quick": False, "links": True, "progress": None}


def test_options_reach_the_measurement(asked):
    result = run("--devices", "cpu, cuda:1", "--host", "lab1", "--quick", "--no-links")
    assert result.exit_code == 0
    assert result.stdout == ""
    assert "not written" in result.stderr
    assert asked == {
        "host": "lab1",
        "devices": ["cpu", "cuda:1"],
        "quick": True,
        "links": False,
        "progress": None,
    }


def test_a_device_that_is_not_here():
    result = run("--devices", "warp9")
    assert isinstance(result.exception, UnknownNameError)
    assert "'warp9'" in str(result.exception)


def another(tmp_path, name: str):
    file = tmp_path / f"{name}.json"
    device = Device(name=f"{name}/cpu", kind="CPU")
    write(file, Fleet(devices=(device,), links=(Link(a=name, b=name, curve=line(1e-4, 1e9)),)))
    return str(file)


def test_files_are_put_together(tmp_path):
    out = tmp_path / "all.json"
    result = run("--merge", another(tmp_path, "a"), another(tmp_path, "b"), "-o", str(out), "--json")
    assert result.exit_code == 0
    fleet = read(out, Fleet)
    assert [d.name for d in fleet.devices] == ["a/cpu", "b/cpu"]
    assert "links between a and b are unknown" in fleet.note
    assert "links between a and b are unknown" in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--merge", "a.json"), "two or more fleet files"),
        (("--merge", "a.json", "b.json", "--host", "x"), "measures nothing"),
        (("a.json",), "files are for --merge"),
        (("--gather", "2", "--join", "a:1"), "gathers or joins"),
    ],
)
def test_ways_that_contradict_each_other_are_refused(arguments, said):
    result = run(*arguments)
    assert isinstance(result.exception, UsageError)
    assert said in str(result.exception)


def test_joining_needs_a_token(asked, monkeypatch):
    monkeypatch.delenv("EVENER_TOKEN", raising=False)
    result = run("--join", "lab1:4711")
    assert isinstance(result.exception, UsageError) and "EVENER_TOKEN" in str(result.exception)


def test_gathering_prints_the_command_for_the_others(asked, monkeypatch, tmp_path):
    monkeypatch.setenv("EVENER_TOKEN", "s3cret")
    monkeypatch.setattr(joining, "gather", lambda fleet, num_hosts, listener, **_: fleet)
    result = run("--gather", "2", "-o", str(tmp_path / "fleet.json"))
    assert result.exit_code == 0
    assert "EVENER_TOKEN=s3cret evener probe --join 127.0.0.1:" in result.stderr
