import json

import pytest
import typer
from typer.testing import CliRunner

from evener.cli.probe import probe
from evener.core.figures import Figure, line
from evener.core.files import read
from evener.core.fleet import Device, Fleet, Link
from evener.errors import UnknownNameError

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
