"""What is believed of a device's speed: jumps after two steps, drifts in time, noise and outliers never."""

import random
from itertools import pairwise

import pytest

from evener.policy.estimate import Estimates, Pace, observed, updated


def believed(seen: list[float], pace: Pace | None = None) -> list[float]:
    """The factor believed after each observation."""
    pace = pace or Pace()
    factors = []
    for factor in seen:
        pace = observed(pace, factor)
        factors.append(pace.factor)
    return factors


def test_a_jump_is_believed_after_the_second_step():
    assert believed([1.02, 0.97, 1.01, 3.1, 3.0, 2.9, 3.1]) == [1, 1, 1, 1, 3.0, 3.0, 3.0]


def test_a_step_that_was_slow_for_a_part_only_delays_the_figure_by_one():
    assert believed([1.0] * 10 + [1.9, 3.0, 3.0])[-3:] == [1.0, 1.9, 3.0]


def test_the_way_back_is_as_quick():
    assert believed([3.0, 1.0, 1.0], Pace(factor=3.0)) == [3.0, 3.0, 1.0]


def test_one_outlier_is_never_believed():
    assert set(believed([1.0, 8.0, 1.0, 1.0, 8.0, 1.0, 8.0, 1.0] * 20)) == {1.0}


def test_a_drift_is_believed_in_time():
    assert believed([1.15] * 9) == [1] * 8 + [1.15]
    assert believed([1.08] * 33) == [1] * 32 + [1.08]
    assert set(believed([1.05] * 200)) == {1.0}


def test_a_jump_within_the_band_of_two_waits_for_nine_also_after_a_long_calm():
    calm = [1.0 + 0.01 * (-1) ** i for i in range(40)]
    factors = believed([*calm, *[1.15] * 9])
    assert factors[40 + 3] == 1.0 and factors[-1] == pytest.approx(1.15)


@pytest.mark.parametrize("seed", range(20))
def test_noise_of_five_percent_never_changes_what_is_believed(seed: int):
    rng = random.Random(seed)
    assert set(believed([1 + rng.uniform(-0.05, 0.05) for _ in range(3000)])) == {1.0}


@pytest.mark.parametrize("seed", range(20))
def test_after_a_jump_the_belief_settles_and_stays(seed: int):
    """Two noisy steps give a figure up to 5 % off, which later ones may mend once; then nothing more."""
    rng = random.Random(seed)
    factors = believed([3 * (1 + rng.uniform(-0.05, 0.05)) for _ in range(3000)])
    changes = [f for f, before in zip(factors, [1.0, *factors], strict=False) if f != before]
    assert len(changes) <= 3
    assert factors[-1] == pytest.approx(3, rel=0.065)


@pytest.mark.parametrize("seed", range(5))
def test_a_heavy_tail_widens_the_bands(seed: int):
    """Log-normal steps: none of 2,000 is believed at σ = 0.1, hardly any at 0.25, where 90 are beyond 1.5."""
    for sigma, most in ((0.1, 0), (0.25, 8)):
        rng = random.Random(seed)
        factors = believed([rng.lognormvariate(0, sigma) for _ in range(2000)])
        assert sum(a != b for a, b in pairwise(factors)) <= most


def test_devices_are_told_by_name():
    estimates = Estimates()
    for _ in range(2):
        estimates, changed = updated(estimates, {"a": 1.0, "b": 2.0})
    assert changed == ("b",)
    assert (estimates.factor("a"), estimates.factor("b"), estimates.factor("c")) == (1.0, 2.0, 1.0)
    assert estimates.factors == {"b": 2.0}
