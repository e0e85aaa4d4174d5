"""Layer seconds carried over to a kind where a model was never profiled."""

import pytest

from benchmarks.published_carry import carried_over, scaled_by_bytes, tables_of
from evener.core.figures import Figure
from evener.core.profile import Layer, Profile, Timing


def profile(model: str, saved: int = 10, **kinds: dict[int, float]) -> Profile:
    """Three equal layers; `kinds` map micro-batches to forward seconds, backward takes twice, update 1 s."""
    layers = tuple(Layer(name=n, num_params=1, param_bytes=4, saved_bytes_per_sample=saved) for n in "abc")
    timings = tuple(
        Timing(
            layer=n,
            kind=kind,
            micro_batch=b,
            forward_s=Figure(value=s, source="table"),
            backward_s=Figure(value=2 * s, source="table"),
            update_s=Figure(value=1.0, source="table"),
        )
        for kind, sizes in kinds.items()
        for b, s in sizes.items()
        for n in "abc"
    )
    return Profile(model=model, layers=layers, timings=timings)


def middle(carried, size):
    return next(t for t in carried.timings if t.layer == "b" and t.micro_batch == size)


def test_worked_numbers():
    """R(1) = 1 / 1.5, R(4) = 2 / 4: a layer of 4 s takes 2 to 2.67 s; at its smallest the other takes 1 s."""
    mine = profile("mine", old={1: 4.0})
    other = profile("other", old={1: 1.5, 4: 4.0}, new={1: 1.0, 4: 2.0})
    carried = carried_over(mine, [other], "new")
    assert middle(carried, 1).forward_s.value == pytest.approx((2 + 4 / 1.5) / 2)
    assert middle(carried, 1).forward_s.spread == pytest.approx((4 / 1.5 - 2) / (4 / 1.5 + 2))
    assert middle(carried, 1).forward_s.source == "assumed"
    assert "from old by the ratio of other" in carried.note


def test_a_scaled_copy_is_carried_over_exactly():
    mine = profile("mine", old={1: 4.0, 2: 8.0})
    other = profile("other", old={1: 1.0, 2: 2.0}, new={1: 0.5, 2: 1.0})
    carried = carried_over(mine, [other], "new")
    assert middle(carried, 2).forward_s.value == pytest.approx(4.0)
    assert middle(carried, 2).forward_s.spread == 0
    assert middle(carried, 2).update_s.value == pytest.approx(1.0)


def test_nothing_in_common_carries_nothing():
    assert carried_over(profile("mine", old={1: 4.0}), [profile("other", new={1: 1.0})], "new") is None
    assert scaled_by_bytes(profile("mine"), [profile("other", old={1: 1.0})], "new") is None


def test_bytes_are_the_last_resort():
    carried = scaled_by_bytes(profile("mine", saved=20), [profile("other", new={1: 1.0, 2: 2.0})], "new")
    assert middle(carried, 2).forward_s.value == pytest.approx(4.0)
    assert "scaled by saved bytes" in carried.note


def test_a_size_without_every_layer_is_no_table():
    whole = profile("m", old={1: 1.0})
    partial = Profile(model="m", layers=whole.layers, timings=whole.timings[:2])
    assert list(tables_of(whole, "old")) == [(1, 1)]
    assert tables_of(partial, "old") == {}
