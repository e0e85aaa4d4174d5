"""The search beside the steps: what goes wrong in its thread is told."""

import pytest

from evener.core.figures import line
from evener.core.job import Job
from evener.errors import UsageError
from evener.planner import plan as make_plan
from evener.policy.adapt import Situation
from evener.session.members.moving import Mover
from tests.unit.planner.small import fleet_of, linear_profile

FLEET = fleet_of(["fast", "slow"], curve=line(1e-4, 1e9))
PROFILE = linear_profile({"fast": 0.004, "slow": 0.012})
NOW = Situation(fleet=FLEET, profile=PROFILE, job=Job(global_batch=16, allow=("unlinked",)))


class Failing(Mover):
    """Its planner fails with `error`."""

    error: Exception

    def _make(self, fleet, profile, job):
        raise self.error


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (UsageError("no plan at all"), "no other placement was found: no plan at all"),
        (ZeroDivisionError("by zero"), "no other placement was found: ZeroDivisionError: by zero"),
    ],
)
def test_a_search_that_fails_says_so_and_proposes_nothing(error: Exception, sentence: str) -> None:
    told: list[str] = []
    proposed: list[str] = []
    mover = Failing(NOW, "all", lambda plan: plan, lambda plan, why: proposed.append(why), told.append)
    mover.error = error
    mover.look(make_plan(FLEET, PROFILE, NOW.job).plan, {"h/0": 3.0}, 100)
    mover._thread.shutdown(wait=True)
    assert told == [sentence] and not proposed
