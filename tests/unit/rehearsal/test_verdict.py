"""When a rehearsal is void, and when a machine is too slow for a fleet."""

from evener.core.figures import Figure
from evener.core.fleet import Device, Fleet, Rehearsed
from evener.rehearsal.verdict import Lateness, check, verdict


def late(lag_s: float, device: str = "a/x", **more) -> Lateness:
    return Lateness(device=device, actions=100, late=3, late_s=5.0, lag_s=lag_s, total_s=10.0, **more)


def fleet(*rates: float, **fields) -> Fleet:
    return Fleet(
        devices=tuple(
            Device(name=f"a/{i}", kind="k", flops={"float32": Figure(value=r, source="assumed")}, **fields)
            for i, r in enumerate(rates)
        )
    )


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


def test_a_fleet_within_the_machine_needs_no_sentence() -> None:
    assert check(fleet(8e9, 4e9, 2e9, 2e9), {"float32": 85e9}, 2) == []


def test_too_fast_a_fleet_says_by_how_much() -> None:
    (sentence,) = check(fleet(40e9, 28e9), {"float32": 85e9}, 2)
    assert "0.80 of this machine" in sentence and "divide all rates by 2 or more" in sentence


def test_factors_above_one_count() -> None:
    fast = fleet(30e9, rehearsed=Rehearsed(factors={"matmul": 2.0}))
    assert len(check(fast, {"float32": 85e9}, 2)) == 1


def test_unknown_dtype_and_too_many_processes() -> None:
    sentences = check(fleet(*[1e6] * 9), {}, 1)
    assert "nothing is known" in sentences[0] and "9 devices on 1 cores" in sentences[1]


def test_single_late_actions_are_told_with_what_was_caught_up() -> None:
    assert "3 of 100 actions ended late for themselves, by 5.000 s together" in verdict([late(0.0)])[1]
    assert "caught up all but 0.000 s" in verdict([late(0.0)])[1]
    assert "late" not in verdict([Lateness(device="a/x", actions=3, total_s=1.0)])[1]


def test_a_machine_far_from_keeping_up_is_told_of_a_scale() -> None:
    assert '"scaled": {"slower": 1000}' in verdict([late(283.0)])[1]
    assert "scaled" not in verdict([late(0.5)])[1]
