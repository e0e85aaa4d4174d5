"""Tensor-parallel teams: only when allowed, only equal devices of a host, priced at their measured degree."""

import pytest

from evener.core.figures import line
from evener.core.job import Job
from evener.core.profile import Profile, Timing
from evener.cost.evaluate import CostModel, evaluate
from evener.errors import NoPlanFitsError
from evener.planner import plan
from evener.planner.groups import degrees_of, groups_of
from evener.planner.teams import team_choices
from tests.unit.planner.small import figure
from tests.unit.planner.test_whole import MIB, chain, devices

ALLOWED = ("tensor-parallel",)


def with_degree_two(profile: Profile, speedup: float) -> Profile:
    """The same layers measured on two devices at once."""
    two = tuple(
        Timing(
            layer=t.layer,
            kind=t.kind,
            micro_batch=t.micro_batch,
            tensor_parallel=2,
            forward_s=figure(t.forward_s.value / speedup),
            backward_s=figure(t.backward_s.value / speedup),
        )
        for t in profile.timings
    )
    return Profile(model=profile.model, layers=profile.layers, timings=(*profile.timings, *two))


# Two layers of 200 MiB with their gradients: a layer fits a device of 512 MiB, both do not.
PROFILE = with_degree_two(chain({"k": 1.0}, layers=2, param=200 * MIB), speedup=1.9)
FLEET = devices(("k", 512 * MIB), ("k", 512 * MIB), curve=line(1e-6, 1e12))


def test_a_team_is_used_only_with_leave():
    """One sample: a pipeline of two takes 2 s, a team of two 2 / 1.9 s."""
    alone = plan(FLEET, PROFILE, Job(global_batch=1), shapes="all")
    assert all(len(x.devices) == 1 for s in alone.plan.pipelines[0].stages for x in s.shares)
    assert alone.plan.prediction.step_s == pytest.approx(2.0, rel=1e-3)
    team = plan(FLEET, PROFILE, Job(global_batch=1, allow=ALLOWED), shapes="all")
    (stage,) = team.plan.pipelines[0].stages
    assert stage.shares[0].devices == ("h/0", "h/1")
    assert team.plan.prediction.step_s == pytest.approx(2.0 / 1.9, rel=1e-3)
    assert team.bound_s <= team.plan.prediction.step_s
    assert set(team.plan.prediction.memory_bytes) == {"h/0", "h/1"}
    assert max(team.plan.prediction.memory_bytes.values()) <= 512 * MIB * 0.9
    again = evaluate(CostModel(fleet=FLEET, profile=PROFILE), team.plan)
    assert again.step_s == team.plan.prediction.step_s


def test_teams_stay_inside_a_host_and_a_kind():
    fleet = devices(("k", 1e9), ("k", 1e9), ("k", 1e9), hosts=["a", "a", "b"], curve=line(1e-6, 1e12))
    job = Job(global_batch=4, allow=ALLOWED)
    choices = list(team_choices(groups_of(fleet, PROFILE, job), PROFILE, job))
    assert [g.teams for g in choices[1]] == [(("a/0", "a/1"),)]
    assert len(list(team_choices(groups_of(fleet, PROFILE, job), PROFILE, Job(global_batch=4)))) == 1
    assert degrees_of(PROFILE, "k") == (1, 2)


def test_a_kind_measured_in_teams_only_is_planned_in_teams():
    only_two = Profile(
        model="m", layers=PROFILE.layers, timings=tuple(t for t in PROFILE.timings if t.tensor_parallel == 2)
    )
    found = plan(FLEET, only_two, Job(global_batch=2, allow=ALLOWED), shapes="all").plan
    assert found.pipelines[0].stages[0].shares[0].devices == ("h/0", "h/1")


def test_what_fits_no_team_fits_nothing():
    small = devices(("k", 100 * MIB), ("k", 100 * MIB))
    with pytest.raises(NoPlanFitsError):
        plan(small, PROFILE, Job(global_batch=1, allow=ALLOWED), shapes="all")
