"""Micro-batches for stealing: as many as cost next to nothing."""

from evener.core.job import Job
from evener.core.plan import Plan
from evener.planner import plan as make_plan
from evener.policy.shares import for_stealing, reshared
from tests.unit.planner.small import fleet_of, linear_profile

FLEET = fleet_of(["fast", "slow"])
SPEEDS = {"fast": 0.004, "slow": 0.012}


def cut(fixed_s: float, micro_batch: int | None = None) -> tuple[Plan, Plan]:
    """(the planner's plan of 128 samples, the same for stealing)."""
    profile = linear_profile(SPEEDS, sizes=(1, 128), fixed_s=fixed_s)
    job = Job(global_batch=128, micro_batch=micro_batch, allow=("unlinked",))
    usual = make_plan(FLEET, profile, job).plan
    return usual, for_stealing(usual, FLEET, profile, job)


def test_sixteen_a_device_where_a_micro_batch_costs_nothing_of_its_own():
    usual, stealing = cut(0.0)
    assert stealing.steal and stealing.samples_by_device() == usual.samples_by_device() == {
        "h/0": 96,
        "h/1": 32,
    }
    assert [p.micro_batch for p in stealing.pipelines] == [6, 2]


def test_fewer_where_they_cost_more_and_never_above_two_percent():
    usual, stealing = cut(0.0015)
    assert stealing.prediction.step_s <= usual.prediction.step_s * 1.02
    assert [len(p.micro_batch_sizes) for p in stealing.pipelines] == [6, 6]
    assert cut(0.2)[1].pipelines == cut(0.2)[0].pipelines


def test_the_users_micro_batch_stays():
    assert [p.micro_batch for p in cut(0.0, micro_batch=4)[1].pipelines] == [4, 4]


def test_new_shares_are_cut_anew():
    profile = linear_profile({"fast": 0.012, "slow": 0.012}, sizes=(1, 128))
    job = Job(global_batch=128, allow=("unlinked",))
    _, stealing = cut(0.0)
    moved, _ = reshared(stealing, FLEET, profile, job)
    assert moved.samples_by_device() == {"h/0": 64, "h/1": 64}
    assert [p.micro_batch for p in moved.pipelines] == [4, 4]
