import pytest

from benchmarks.random_plans import stage
from evener.core.plan import Pipeline, Plan
from evener.errors import UsageError
from evener.schedules import NAMES, check, make
from tests.unit.schedules.plans import chain, stage_costs

FIXED = [name for name in NAMES if name != "unequal"]


def test_names():
    with pytest.raises(UsageError, match="'2f2b'"):
        make(chain(["h/0", "h/1"], 2), name="2f2b")
    with pytest.raises(UsageError, match="needs costs"):
        make(chain(["h/0", "h/1"], 2), name="unequal")


@pytest.mark.parametrize("name", FIXED)
@pytest.mark.parametrize(
    "devices", [("a", "b", "a"), ("a", "a", "b"), ("a", "b", "b", "a"), ("a", "b", "c", "b")]
)
def test_any_stage_to_device_map(name, devices):
    plan = chain([f"h/{d}" for d in devices], 5)
    schedule = make(plan, name=name)
    assert check(schedule, plan) == []
    assert set(schedule.actions) == {f"h/{d}" for d in devices}


@pytest.mark.parametrize("name", NAMES)
def test_a_device_in_two_pipelines_with_cuts_of_their_own(name):
    first = Pipeline(samples=4, micro_batch=1, stages=(stage("abc", ("h/0", 1)), stage("d", ("h/1", 1))))
    second = Pipeline(samples=6, micro_batch=2, stages=(stage("a", ("h/1", 2)), stage("bcd", ("h/0", 2))))
    plan = Plan(global_batch=10, pipelines=(first, second))
    schedule = make(plan, name=name, costs=stage_costs(plan, {0: 3.0, 1: 1.0, 2: 2.0, 3: 6.0}))
    assert check(schedule, plan) == []
    row = [str(a) for a in schedule.actions["h/0"]]
    assert row.index("3REDUCE_GRAD") < row.index("0REDUCE_GRAD"), "later layers first, as on h/1"


@pytest.mark.parametrize("name", NAMES)
def test_a_shared_stage_sends_each_piece_once(name):
    shared = stage("b", ("h/1", 2), ("h/2", 1))
    pipeline = Pipeline(samples=7, micro_batch=3, stages=(stage("a", ("h/0", 3)), shared))
    plan = Plan(global_batch=7, pipelines=(pipeline,))
    schedule = make(plan, name=name, costs=stage_costs(plan, {0: 1.0, 1: 2.0}))
    assert check(schedule, plan) == []
    rows = {d: [str(a) for a in row] for d, row in schedule.actions.items()}
    assert "1F2" in rows["h/1"] and "1F2" not in rows["h/2"], "the last micro-batch of 1 goes to h/1 alone"
    assert rows["h/0"].count("0SEND_F0") == 1
