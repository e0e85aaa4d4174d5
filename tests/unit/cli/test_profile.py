import json
import sys
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

from evener.cli.profile import parse_sizes, profile
from evener.core.figures import Figure
from evener.core.files import read, write
from evener.core.fleet import Device, Fleet
from evener.core.profile import Layer, Profile, StepTiming
from evener.errors import UsageError

MEASURED = Profile(
    model="net",
    layers=(Layer(name="a", num_params=1200, param_bytes=4800),),
    steps=(
        StepTiming(kind="k", micro_batch=1, forward_s=Figure(value=2e-3, source="measured", spread=0.01)),
        StepTiming(kind="k", micro_batch=2, fits=False),
    ),
    note="2 samples do not fit",
)


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """What the measurement was asked for, in place of measuring."""
    asked = {}
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text("def recipe(): ...")

    def profile_recipe(script, *, report, **given):
        report("measuring")
        asked.update(given, script=script)
        return MEASURED

    monkeypatch.setitem(
        sys.modules, "evener.session.planning.measure", SimpleNamespace(profile_recipe=profile_recipe)
    )
    return asked


def run(*arguments):
    app = typer.Typer()
    app.command()(profile)
    return CliRunner().invoke(app, arguments)


def test_the_profile_is_written_and_told(asked, tmp_path):
    file = tmp_path / "profile.json"
    result = run("net.py", "-o", str(file), "--json")
    assert result.exit_code == 0
    assert read(file, Profile) == MEASURED
    assert json.loads(result.stdout)["profile"]["model"] == "net"
    for words in ("measuring", "1,200 parameters", "does not fit", "2 samples do not fit"):
        assert words in result.stderr
    assert asked == {
        "script": "net.py",
        "fleet": None,
        "rehearse": False,
        "micro_batches": None,
        "seed": 0,
    }


def test_a_rehearsed_fleet(asked, tmp_path):
    fleet = Fleet(devices=(Device(name="lab1/gpu0", kind="k"),))
    write(tmp_path / "fleet.json", fleet)
    result = run(
        "net.py", "--rehearse", str(tmp_path / "fleet.json"), "--micro-batches", "4,1", "--seed", "7"
    )
    assert result.exit_code == 0
    assert asked == {
        "script": "net.py",
        "fleet": fleet,
        "rehearse": True,
        "micro_batches": (1, 4),
        "seed": 7,
    }


def test_two_fleets_contradict_each_other(asked):
    result = run("net.py", "--fleet", "a.json", "--rehearse", "b.json")
    assert isinstance(result.exception, UsageError)
    assert asked == {}


@pytest.mark.parametrize("text", ["", "0", "1,-2", "a", "1.5"])
def test_sizes_are_whole_numbers_above_zero(text):
    with pytest.raises(UsageError, match="whole numbers above 0"):
        parse_sizes(text)
