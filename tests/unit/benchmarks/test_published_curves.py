"""Curves from published rates, also where a fit went wrong."""

import itertools

import numpy as np
import pytest

from benchmarks.published_curves import curve_of_rates, slower_of
from evener.core.figures import line


def test_worked_numbers():
    curve = curve_of_rates([(1e6, -1.0), (2e6, 1e9), (4e6, 5e8)], peak_bytes_per_s=8e8)
    assert curve.seconds(1.0) == curve.seconds(2e6) == pytest.approx(2.5e-3)
    assert curve.seconds(4e6) == pytest.approx(5e-3)


@pytest.mark.parametrize("poly", [(-0.5, 14.0, 44.0), (0.8, 16.0, 33.0), (-0.002, 0.14, 1.1), (5.0, -40.0)])
def test_any_polynomial_gives_positive_seconds_that_never_fall(poly):
    sizes = 2.0 ** np.arange(-20, 17)
    curve = curve_of_rates(zip(sizes * 2**20, np.polyval(poly, np.log2(sizes)) * 1e9, strict=True))
    seconds = [curve.seconds(b) for b in np.geomspace(1, 1e10, 500)]
    assert seconds[0] > 0
    assert all(a <= b for a, b in itertools.pairwise(seconds))


def test_rates_that_are_never_positive_are_refused():
    with pytest.raises(ValueError, match="positive"):
        curve_of_rates([(1e6, -1.0), (2e6, 0.0)])


def test_the_slower_of_two_wins_at_each_size():
    late, slow = line(1e-2, 1e9), line(1e-4, 1e8)
    both = slower_of(late, slow)
    for num_bytes in (0.0, 1e9):
        assert both.seconds(num_bytes) == pytest.approx(max(late.seconds(num_bytes), slow.seconds(num_bytes)))
