import pytest

from evener.core.figures import Figure
from evener.core.profile import Layer, Profile, StepTiming, Timing, merge_profiles
from evener.errors import UsageError


def on(kind, *, layers=("a", "b"), note=""):
    second = Figure(value=1.0, source="measured")
    return Profile(
        model="net",
        layers=tuple(Layer(name=n, num_params=3, param_bytes=12) for n in layers),
        timings=(Timing(layer=layers[0], kind=kind, micro_batch=2, forward_s=second),),
        steps=(StepTiming(kind=kind, micro_batch=2, forward_s=second),),
        gradient_bytes=24,
        note=note,
    )


def test_kinds_stand_side_by_side():
    merged = merge_profiles([on("fast", note="cut"), on("slow"), on("odd", note="cut")])
    assert merged.kinds == ("fast", "slow", "odd")
    assert [t.kind for t in merged.timings] == ["fast", "slow", "odd"]
    assert merged.layers == on("fast").layers
    assert merged.gradient_bytes == 24
    assert merged.note == "cut"
    assert merge_profiles([on("fast")]) == on("fast")


def test_a_kind_measured_twice_is_refused():
    with pytest.raises(UsageError, match="two profiles measured kind 'fast'"):
        merge_profiles([on("fast"), on("fast")])


def test_different_models_are_refused_by_name():
    with pytest.raises(UsageError, match="layers in one only: b, c"):
        merge_profiles([on("fast"), on("slow", layers=("a", "c"))])


def test_nothing_to_merge():
    with pytest.raises(UsageError, match="no profile"):
        merge_profiles([])
