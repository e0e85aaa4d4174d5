"""What `check` finds when a sound schedule is spoilt by hand."""

import pytest

from evener.core.actions import parse_schedule
from evener.errors import ScheduleError
from evener.schedules import check, ensure, make
from tests.unit.schedules.plans import chain, data_parallel

SOUND = (
    "h/0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE_GRAD STEP\n"
    "h/1: 1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1REDUCE_GRAD STEP\n"
)
PLAN = chain(["h/0", "h/1"], 2)


def test_sound():
    assert str(make(PLAN, name="1f1b")) == SOUND
    assert check(parse_schedule(SOUND), PLAN) == []


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("0SEND_F1 ", "", "h/0: 0SEND_F1 is missing"),
        ("0SEND_F1 ", "0SEND_F1 0SEND_B1 ", "h/0: 0SEND_B1 is without a peer"),
        ("1F1 ", "", "h/1: 1F1 is missing"),
        ("1F1 ", "1F1 1F1 ", "h/1: 1F1 is there 2 times"),
        ("1F1 ", "1F1 1F2 ", "h/1: 1F2 is no work of this device"),
        ("1F1 ", "1F1 0F1 ", "h/1: 0F1 is no work of this device"),
        ("1B1 ", "1B1 1W1 ", "micro-batch 1 has B W: either B, or I and W"),
        ("1B1 ", "1I1 ", "micro-batch 1 has I: either B, or I and W"),
        ("1B1 ", "", "the backward of stage 1, micro-batch 1 is missing"),
        ("1RECV_F1 1F1", "1F1 1RECV_F1", "h/1: 1F1 comes before 1RECV_F1"),
        ("1B1 1SEND_B1", "1SEND_B1 1B1", "h/1: 1SEND_B1 comes before 1B1"),
        ("1F1 1B1 1SEND_B1 1REDUCE_GRAD", "1F1 1REDUCE_GRAD 1B1 1SEND_B1", "1REDUCE_GRAD comes before 1B1"),
        ("0REDUCE_GRAD ", "", "the reductions must be 0REDUCE_GRAD"),
        ("0REDUCE_GRAD STEP", "STEP 0REDUCE_GRAD", "the row must end with its only STEP"),
        ("h/1: 1RECV", "h/2: 1RECV", "h/1 is in the plan and has no row"),
        ("0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0", "0RECV_B0 0F0 0SEND_F0 0B0 0F1 0SEND_F1", "deadlocks"),
    ],
)
def test_spoilt(old, new, said):
    assert old in SOUND
    spoilt = parse_schedule(SOUND.replace(old, new, 1))
    assert any(said in problem for problem in check(spoilt, PLAN)), check(spoilt, PLAN)
    with pytest.raises(ScheduleError):
        ensure(spoilt, PLAN)


def test_a_deadlock_names_who_waits_where():
    spoilt = SOUND.replace("0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0", "0RECV_B0 0F0 0SEND_F0 0B0 0F1 0SEND_F1")
    (problem,) = check(parse_schedule(spoilt), PLAN)
    assert problem == "the schedule deadlocks: h/0 waits at 0RECV_B0; h/1 waits at 1RECV_F0"


def test_reductions_out_of_order_are_found():
    """Two devices that hold the same two layers as stages 0, 1 must sum them in one order."""
    plan = data_parallel(2, 2)
    schedule = make(plan)
    assert check(schedule, plan) == []
    two = chain(["h/0", "h/0"], 1)
    printed = str(make(two, name="1f1b"))
    assert "1REDUCE_GRAD" in printed and printed.index("1REDUCE_GRAD") < printed.index("0REDUCE_GRAD")
    swapped = parse_schedule("h/0: 0F0 1F0 1B0 0B0 0REDUCE_GRAD 1REDUCE_GRAD STEP\n")
    assert check(swapped, two) == ["h/0: the reductions must be 1REDUCE_GRAD 0REDUCE_GRAD, in this order"]
