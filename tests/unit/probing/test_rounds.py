from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.probing.rounds import LEAST_ROUNDS, MOST_ROUNDS, Task, covering, fastest, fit_curve, run_rounds


class Clock:
    """Moves only when told to."""

    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s

    def takes(self, *seconds):
        """A call that takes the given seconds in turn, then the last again and again."""
        left = list(seconds)

        def call():
            self.now_s += left.pop(0) if len(left) > 1 else left[0]
            return self.now_s

        return call


def test_the_fastest_call_counts_but_not_the_first():
    clock = Clock()
    call = clock.takes(0.001, 5.0, 3.0, 4.0, 1.0)
    assert fastest(call, clock=clock, slot_s=0.0) == pytest.approx(3.0)


def test_a_slot_is_filled():
    clock = Clock()
    assert fastest(clock.takes(9.0, 0.3, 0.3, 0.3, 0.1, 7.0), clock=clock, slot_s=1.0) == pytest.approx(0.1)


def test_every_task_is_sampled_once_a_round_and_the_first_round_is_dropped():
    clock = Clock()
    asked = []

    def sample(name, seconds):
        def call():
            asked.append(name)
            clock.now_s += seconds
            return seconds

        return call

    tasks = [Task(name="a", sample=sample("a", 1.0)), Task(name="b", sample=sample("b", 2.0))]
    parts = []
    samples = run_rounds(tasks, clock=clock, seconds=20.0, progress=lambda part, name: parts.append(part))
    assert samples == {"a": [1.0] * 6, "b": [2.0] * 6}
    assert asked == ["a", "b"] * 7
    assert parts == sorted(parts)
    assert 0 == parts[0] < parts[-1] <= 1


@pytest.mark.parametrize(("seconds", "rounds"), [(0.5, LEAST_ROUNDS), (1e9, MOST_ROUNDS)])
def test_there_are_neither_too_few_nor_too_many_rounds(seconds, rounds):
    clock = Clock()
    samples = run_rounds([Task(name="a", sample=clock.takes(1.0))], clock=clock, seconds=seconds)
    assert len(samples["a"]) == rounds


def test_the_spread_covers_the_range_and_grows_where_rounds_are_few():
    twelve = covering([9.0, 11.0] + [10.0] * 10)
    assert (twelve.value, twelve.source) == (10.0, "measured")
    assert twelve.spread == pytest.approx(0.3)
    assert covering([9.0, 10.0, 11.0]).spread == pytest.approx(0.6)
    assert covering([10.0, 10.0]).spread == 0.05


def test_medians_in_the_wrong_order_share_their_mean():
    curve = fit_curve({1: [2.0] * 9, 2: [1.0] * 9, 3: [5.0] * 9})
    assert curve.points == ((1, 1.5), (2, 1.5), (3, 5.0))
    assert curve.spread >= 0.5  # what was moved is part of what is not known


def test_a_curve_goes_on_rising_beyond_its_end():
    curve = fit_curve({1: [1.0], 2: [6.0], 4: [4.0]})
    assert curve.points == ((1, 1.0), (4, 5.0))
    assert curve.seconds(1e10) > 1e9


@given(
    st.dictionaries(
        st.integers(1, 2**34), st.lists(st.floats(1e-7, 10), min_size=1, max_size=5), min_size=1, max_size=8
    )
)
def test_every_fitted_curve_is_positive_and_never_falls(samples):
    curve = fit_curve(samples)
    grid = [curve.seconds(2.0**k) for k in range(34)]
    assert grid[0] > 0
    assert all(b >= a for a, b in pairwise(grid))
    medians = [covering(s).value for s in samples.values()]
    assert min(medians) * 0.999 <= curve.points[0][1] <= curve.points[-1][1] <= max(medians) * 1.001
