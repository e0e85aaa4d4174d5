"""Whom a device that is done helps within a step."""

import pytest

from evener.core.stealing import Waiting, seconds_left, whom_to_help


def waiting(device: str = "a", **more: float) -> Waiting:
    usual = {"size": 4, "last": 4, "drawn": 3, "left": 4, "predicted_s": 1.0}
    return Waiting(device=device, **(usual | more))  # type: ignore[arg-type]


def test_what_is_left_goes_on_at_the_pace_of_this_step():
    assert seconds_left(waiting(), 5.0) == pytest.approx(10.0)
    assert seconds_left(waiting(last=2), 5.0) == pytest.approx(9.0)


def test_the_first_micro_batch_counts_as_predicted_until_it_has_taken_longer():
    assert seconds_left(waiting(drawn=1), 0.2) == pytest.approx(5 * 1.0)
    assert seconds_left(waiting(drawn=1), 3.0) == pytest.approx(5 * 3.0)
    assert seconds_left(waiting(drawn=0), 3.0) == pytest.approx(5 * 3.0)


def test_a_taker_must_be_done_before_the_other_would_be():
    ask = {"elapsed_s": 5.0, "own_last": 2}
    assert whom_to_help([waiting()], sample_s=1.5, **ask) == waiting()
    assert whom_to_help([waiting()], sample_s=2.0, **ask) is None


def test_who_needs_longest_is_helped_and_who_has_nothing_waiting_is_not():
    slow, empty = waiting("slow", left=6), waiting("empty", left=0, last=400)
    assert whom_to_help([waiting(), slow, empty], elapsed_s=5.0, sample_s=0.1, own_last=1) == slow
    assert whom_to_help([empty], elapsed_s=5.0, sample_s=0.1, own_last=1) is None
    assert whom_to_help([], elapsed_s=5.0, sample_s=0.1, own_last=1) is None
