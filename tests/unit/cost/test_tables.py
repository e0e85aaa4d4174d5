"""Tables by micro-batch size: between, below and beyond what was measured."""

import numpy as np
import pytest

from evener.core.figures import Figure
from evener.core.profile import Layer, Profile, StepTiming, Timing
from evener.cost.layers import layer_cost
from evener.cost.step import step_cost
from evener.errors import OutOfRangeError, UnknownNameError


def figure(value, spread=0.0):
    return Figure(value=value, source="measured", spread=spread)


def timing(layer, size, forward, backward=1.0, *, kind="k", fits=True, spread=0.0):
    if not fits:
        return Timing(layer=layer, kind=kind, micro_batch=size, fits=False)
    f, b = figure(forward, spread), figure(backward, spread)
    return Timing(layer=layer, kind=kind, micro_batch=size, forward_s=f, backward_s=b)


def profile(*timings, steps=(), layers=("a",)):
    made = tuple(Layer(name=n, num_params=1, param_bytes=100, saved_bytes_per_sample=10) for n in layers)
    return Profile(model="m", layers=made, timings=timings, steps=steps, state_bytes=200)


def step(size, forward, *, fits=True, peak=None, backward=1.0, spread=0.0):
    if not fits:
        return StepTiming(kind="k", micro_batch=size, fits=False)
    return StepTiming(
        kind="k",
        micro_batch=size,
        forward_s=figure(forward, spread),
        backward_s=figure(backward, spread),
        peak_bytes=figure(peak) if peak else None,
    )


def test_layers_between_sizes_lie_on_the_line():
    cost = layer_cost(profile(timing("a", 2, 1.0), timing("a", 4, 3.0)), "k")
    assert cost.seconds(3)[0] == pytest.approx([2.0])
    assert cost.seconds(1)[0] == pytest.approx([1.0])


def test_layers_go_on_along_the_last_slope_and_refuse_far_outside():
    cost = layer_cost(profile(timing("a", 2, 1.0), timing("a", 4, 3.0)), "k")
    assert cost.seconds(8)[0] == pytest.approx([7.0])
    with pytest.raises(OutOfRangeError, match="measured sizes: 2, 4"):
        cost.seconds(9)


def test_a_layer_never_costs_less_in_a_larger_micro_batch():
    """Seen 10, 1 and 5 s at 1, 2 and 4 samples: 2 were told to take 10 s and 3 to take 3."""
    cost = layer_cost(profile(timing("a", 1, 10.0), timing("a", 2, 1.0), timing("a", 4, 5.0)), "k")
    assert [float(cost.seconds(b)[0][0]) for b in (1, 2, 3, 4, 6)] == [10.0] * 5


def test_a_size_that_did_not_fit_ends_the_table():
    cost = layer_cost(profile(timing("a", 2, 1.0), timing("a", 4, 0, fits=False), timing("a", 8, 9.0)), "k")
    assert cost.largest == 2


def test_layers_add_up_to_the_measured_step():
    whole = step(2, 4.0, backward=4.0)
    cost = layer_cost(
        profile(timing("a", 2, 1.0), timing("b", 2, 1.0), steps=(whole,), layers=("a", "b")), "k"
    )
    forward, backward = cost.seconds(2)
    assert float((forward + backward).sum()) == pytest.approx(8.0)


def test_a_missing_layer_or_kind_is_named():
    with pytest.raises(UnknownNameError, match="layer 'b'"):
        layer_cost(profile(timing("a", 2, 1.0), layers=("a", "b")), "k")
    with pytest.raises(UnknownNameError, match="kinds measured: k"):
        layer_cost(profile(timing("a", 2, 1.0)), "other")
    with pytest.raises(UnknownNameError, match="kinds measured: k"):
        step_cost(profile(timing("a", 2, 1.0)), "other")


def test_the_sides_move_by_the_spread():
    p = profile(timing("a", 2, 1.0, spread=0.1))
    assert layer_cost(p, "k", side=1).seconds(2)[0] == pytest.approx([1.1])
    assert step_cost(p, "k", side=-1).forward_s[2] == pytest.approx(0.9)


def test_a_larger_micro_batch_never_costs_less():
    cost = step_cost(profile(steps=(step(1, 2.0), step(2, 1.5), step(4, 3.0))), "k")
    assert (np.diff(cost.forward_s) >= 0).all()
    assert cost.forward_s[0] == 0


def test_the_whole_step_falls_back_to_the_layers_and_their_bytes():
    cost = step_cost(profile(timing("a", 2, 1.0), timing("a", 4, 3.0)), "k")
    assert cost.forward_s[3] == pytest.approx(2.0)
    assert cost.peak_bytes[4] == pytest.approx(100 + 100 + 200 + 100 + 4 * 10)  # and the reduction's bucket


def test_the_largest_micro_batch_within_memory():
    cost = step_cost(profile(steps=(step(1, 1.0, peak=100), step(4, 4.0, peak=400))), "k")
    assert [cost.largest_within(b) for b in (99, 100, 299, 300, 1e9)] == [0, 1, 2, 3, 4]


def test_nothing_that_fitted_is_an_error():
    with pytest.raises(OutOfRangeError, match="no measured micro-batch fitted"):
        step_cost(profile(steps=(step(1, 0, fits=False),)), "k")
