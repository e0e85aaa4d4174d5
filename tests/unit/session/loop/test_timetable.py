"""Schedules that the leading process makes for all, and those that a plan gives by itself."""

import pytest
import torch.distributed as dist
from msgspec.structs import replace

from evener import schedules
from evener.core.order import resized
from evener.cost.evaluate import CostModel
from evener.errors import PeerLostError, ScheduleError, UsageError
from evener.session.loop.timetable import Timetable, agreed_schedules, step_sizes
from evener.session.meeting import Meeting
from evener.sim import plan_costs
from tests.unit.cost.test_actions import CUT, fleet, profile
from tests.unit.schedules.test_waves import HYBRID, IN_WAVES, LAYERS

UNEQUAL = replace(CUT, schedule="unequal")


def test_the_sizes_of_steps() -> None:
    assert step_sizes(10, 4) == (4, 2)
    assert step_sizes(8, 4) == (4,)
    assert step_sizes(3, 4) == (3,)


def test_the_leading_process_makes_what_needs_seconds_and_all_get_it() -> None:
    store = dist.HashStore()
    meetings = [Meeting(store, rank, 2) for rank in range(2)]
    found = [agreed_schedules(UNEQUAL, (16, 6), fleet(), profile(), m) for m in meetings]
    assert found[0] == found[1]
    costs = plan_costs(CostModel(fleet=fleet(), profile=profile()), resized(UNEQUAL, 6))
    wanted = schedules.make(resized(UNEQUAL, 6), costs=costs)
    assert found[1][6] == wanted
    assert Timetable(made=found[1]).schedule(resized(UNEQUAL, 6)) is found[1][6]


def test_a_plan_with_other_micro_batches_goes_on_with_1f1b() -> None:
    made = {16: schedules.make(UNEQUAL, name="gpipe")}
    table = Timetable(made=made)
    assert table.schedule(UNEQUAL) is made[16]
    assert table.after_shrinking().schedule(UNEQUAL) == schedules.make(UNEQUAL, name="1f1b")


def test_nothing_is_handed_out_where_the_plan_is_enough() -> None:
    assert agreed_schedules(CUT, (16,), fleet(), None, Meeting(dist.HashStore(), 1, 2)) == {}


def test_without_a_profile_there_is_no_unequal_schedule() -> None:
    store = dist.HashStore()
    with pytest.raises(UsageError, match="--profile with the file"):
        agreed_schedules(UNEQUAL, (16,), fleet(), None, Meeting(store, 0, 2))
    store.set("failure/1", b'{"device": "x/0", "code": "EV103", "exit_code": 2, "what": "no profile"}')
    with pytest.raises(PeerLostError, match="x/0 failed while schedule/16 was awaited"):
        agreed_schedules(UNEQUAL, (16,), fleet(), None, Meeting(store, 1, 2))


def test_under_waves_gpipe_has_all_forwards_first_and_1f1b_is_refused() -> None:
    table = Timetable(norms=LAYERS)
    assert table.schedule(HYBRID) == IN_WAVES
    assert Timetable().schedule(HYBRID) != IN_WAVES
    with pytest.raises(ScheduleError, match="2 pipelines of 2, 1 stages"):
        table.schedule(replace(HYBRID, schedule="1f1b"))
