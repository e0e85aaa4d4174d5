"""When a rehearsal is void, and when a machine is too slow for a plan."""

from evener.rehearsal.verdict import Lateness, foreseen, verdict


def late(lag_s: float, device: str = "a/x", **more) -> Lateness:
    return Lateness(device=device, actions=100, late=3, late_s=5.0, lag_s=lag_s, total_s=10.0, **more)


def test_one_percent_is_the_limit_of_each_device() -> None:
    holds, why = verdict([late(0.09), late(0.01, "a/y")])
    assert holds and "a/x did worst: 0.090 s behind" in why and "0.90%" in why
    holds, why = verdict([late(0.0), late(0.11, "a/y")])
    assert not holds and "void" in why and "a/y" in why


def test_guessed_launches_are_told() -> None:
    assert "4 reductions" in verdict([late(0.0, guessed=4)])[1]


def test_nothing_paced() -> None:
    assert verdict([])[0]
    assert "no action was paced" in verdict([Lateness(device="a/x")])[1]


def test_a_plan_within_the_machine_needs_no_sentence() -> None:
    assert foreseen(3.1e9, 0.1, 80e9) == ""


def test_devices_that_are_faster_than_the_machine_are_told_beforehand_by_how_much() -> None:
    sentence = foreseen(18e9, 9e-3, 80e9)
    assert "18 GFLOP in a step of 0.009 s, 2e+03 GFLOP/s, and its cores do 80 in large products" in sentence
    assert "slower, at least 63 times" in sentence


def test_single_late_actions_are_told_with_what_was_caught_up() -> None:
    assert "3 of 100 actions ended late for themselves, by 5.000 s together" in verdict([late(0.0)])[1]
    assert "caught up all but 0.000 s" in verdict([late(0.0)])[1]
    assert "late" not in verdict([Lateness(device="a/x", actions=3, total_s=1.0)])[1]


def test_a_machine_far_from_keeping_up_is_told_of_a_scale() -> None:
    assert '"scaled": {"slower": 1000}' in verdict([late(283.0)])[1]
    assert "scaled" not in verdict([late(0.5)])[1]
