"""Files and numbers that cannot be: each an error with its code, the place and what would work."""

import json

import pytest

from evener.cli.main import main
from evener.core.actions import parse_schedule
from evener.core.figures import line
from evener.core.files import encode
from evener.core.plan import Pipeline, Plan, Share, Stage
from evener.errors import ScheduleError
from evener.schedules import make
from evener.schedules.check import ensure
from tests.unit.planner.small import fleet_of
from tests.unit.planner.test_whole import chain

TWO = fleet_of(["fast", "slow"], memory=1e9, curve=line(1e-3, 1e9))
PROFILE = chain({"fast": 1.0, "slow": 3.0})


def stage(device, *layers):
    return Stage(layers=layers, shares=(Share(devices=(device,), samples=1),))


CUT = Plan(
    global_batch=2,
    pipelines=(
        Pipeline(
            samples=2,
            micro_batch=1,
            stages=(stage("h/0", "l0", "l1", "l2"), stage("h/1", "l3", "l4", "l5", "l6", "l7")),
        ),
    ),
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, value in (("fleet", TWO), ("profile", PROFILE), ("plan", CUT)):
        (tmp_path / f"{name}.json").write_bytes(encode(value))
    return tmp_path


def spoil(folder, name, *path_and_value):
    """Replace what is at a path inside a file; a function changes it."""
    file = folder / f"{name}.json"
    data = json.loads(file.read_text())
    *path, last, value = path_and_value
    at = data
    for key in path:
        at = at[key]
    at[last] = value(at[last]) if callable(value) else value
    file.write_text(json.dumps(data))


def refused(capsys, *args):
    with pytest.raises(SystemExit) as stopped:
        main([*args, "--json"])
    error = json.loads(capsys.readouterr().out.splitlines()[-1])["error"]
    assert stopped.value.code == (1 if error["code"] == "EV201" else 2)
    assert error["remedy"], error
    return error


PLAN = ("plan", "fleet.json", "profile.json", "--batch", "8")


@pytest.mark.parametrize(
    ("spoilt", "code", "words"),
    [
        (("fleet", "devices", 1, "kind", "slwo"), "EV102", "slwo"),
        (("fleet", "links", []), "EV102", "h/0 and h/1"),
        (("fleet", "devices", 0, "memory_bytes", "value", 0), "EV101", "$.devices[0].memory_bytes"),
        (("fleet", "devices", 0, "memory_bytes", "value", -1), "EV101", "positive"),
        (("fleet", "links", 0, "curve", "points", [[0, -1]]), "EV101", "$.links[0].curve"),
        (("fleet", "links", 0, "a", "other"), "EV101", "'other'"),
        (("profile", "timings", lambda rows: rows[1:-4]), "EV102", "l7"),
        (("profile", "timings", 0, "micro_batch", 0), "EV101", "micro_batch of 'l0'"),
        (("profile", "timings", 0, "forward_s", "value", 0), "EV101", "$.timings[0].forward_s"),
        (("profile", "layers", 0, "param_bytes", -1), "EV101", "$.layers[0]"),
        (("profile", "layers", 0, "flops_per_sample", -1.0), "EV101", "FLOPs of layer 'l0'"),
        (("profile", "layers", 0, "tied", ["l0"]), "EV101", "tied to itself"),
        (("profile", "layers", 0, "tied", ["l9"]), "EV101", "no layer of the profile"),
    ],
)
def test_plan_refuses(folder, capsys, spoilt, code, words):
    spoil(folder, *spoilt)
    error = refused(capsys, *PLAN, "--shapes", "all")
    assert error["code"] == code
    assert words in error["what"] + error["numbers"]


def test_a_cycle_of_ties_is_refused(folder, capsys):
    for a, b in ((0, 1), (1, 2), (2, 0)):
        spoil(folder, "profile", "layers", a, "tied", [f"l{b}"])
    error = refused(capsys, *PLAN)
    assert error["code"] == "EV101" and "'l0' is tied to 'l1', which names l2" in error["what"]


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("--batch", "0"), "EV103"),
        (("--micro-batch", "0"), "EV103"),
        (("--memory-margin", "1"), "EV103"),
        (("--max-step", "-1"), "EV103"),
        (("--max-price", "0"), "EV103"),
        (("--allow", "everything"), "EV103"),
        (("--model", "gpt2"), "EV103"),
        (("--what-if", "slow h/0 x0"), "EV103"),
        (("--what-if", "drop h/7"), "EV102"),
        (("--place", "l9=h/0"), "EV102"),
    ],
)
def test_wrong_words_are_refused(folder, capsys, words, code):
    assert refused(capsys, *PLAN, *words)["code"] == code


def test_a_model_needs_kinds_and_a_name(folder, capsys):
    by_model = ("plan", "fleet.json", "--batch", "8", "--model")
    assert "catalogue holds no kind 'fast'" in refused(capsys, *by_model, "gpt2")["what"]
    assert "gpt3-175b" in refused(capsys, *by_model, "gpt5")["remedy"]
    assert refused(capsys, *by_model, "missing.json")["code"] == "EV101"
    assert refused(capsys, "plan", "fleet.json", "--batch", "8")["code"] == "EV103"


SIMULATE = ("simulate", "plan.json", "--fleet", "fleet.json", "--profile", "profile.json")


@pytest.mark.parametrize(
    ("spoilt", "code", "words"),
    [
        (("plan", "pipelines", 0, "stages", 1, "layers", 0, "l2"), "EV101", "layers are placed twice: l2"),
        (("plan", "pipelines", 0, "stages", 0, "layers", ["l0", "l1"]), "EV202", "l2"),
        (("plan", "pipelines", 0, "stages", 0, "shares", 0, "devices", ["h/9"]), "EV202", "h/9"),
        (("plan", "pipelines", 0, "micro_batch", 0), "EV101", "micro_batch"),
        (("fleet", "links", []), "EV102", "h/0 and h/1"),
    ],
)
def test_simulate_refuses(folder, capsys, spoilt, code, words):
    spoil(folder, *spoilt)
    error = refused(capsys, *SIMULATE)
    assert error["code"] == code
    assert words in error["what"] + error["numbers"]


def test_simulate_lets_data_cost_nothing_with_leave(folder, capsys):
    spoil(folder, "fleet", "links", [])
    with pytest.raises(SystemExit) as done:
        main([*SIMULATE, "--allow", "unlinked", "--json"])
    assert done.value.code == 0


def test_a_schedule_with_an_unmatched_send_is_refused_with_its_place():
    rows = str(make(CUT, name="1f1b"))
    assert "0SEND_F1" in rows
    spoilt = parse_schedule(rows.replace("0SEND_F1 ", ""))
    with pytest.raises(ScheduleError) as caught:
        ensure(spoilt, CUT)
    assert "h/0: 0SEND_F1 is missing" in caught.value.numbers
    assert caught.value.remedy and caught.value.code == "EV204"
