import pytest

from evener.profiling.timing import Stopwatch, figure_of, is_steady
from tests.unit.profiling.fakes import ScriptedDriver


def test_median_and_quartile_spread():
    figure = figure_of([12e-3, 9e-3, 10e-3])
    assert figure.value == 10e-3
    assert figure.spread == pytest.approx(0.075)
    assert figure.source == "measured"


def test_no_time_is_no_figure():
    assert figure_of([]) is None
    assert figure_of([0.0, 0.0]) is None


def test_steady_needs_three_that_agree():
    assert not is_steady([1.0, 1.0])
    assert is_steady([2.0, 1.0, 1.0, 1.0005])
    assert not is_steady([1.0, 1.0, 1.01])


def test_the_watch_counts_on_the_drivers_clock():
    watch = Stopwatch(ScriptedDriver(lambda action, signature: 0.5), budget_s=2.0)
    assert watch.timed("0F0", lambda: "done") == ("done", 0.5)
    assert watch.left_s == 1.5
