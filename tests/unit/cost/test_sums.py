"""Which devices sum together under a plan, and how each of those sums goes."""

import pytest

from evener.core.exchange import exchange_of, reductions_of
from evener.core.exchange_seconds import exchange_seconds
from evener.core.figures import Figure, line
from evener.core.fleet import Device, Fleet, Link
from evener.core.plan import Plan
from evener.core.profile import Layer, Profile, Timing
from evener.cost.evaluate import CostModel, evaluate
from evener.cost.exchange import sums_of
from evener.cost.sums import gradient_sets, with_groups
from tests.local.plans import plan_of, stage

NAMES = ("a/0", "a/1", "b/0", "b/1")
MIB = 2**20
LAYERS = ("embed", "one", "two", "head")


def profile(*, tied: bool = False) -> Profile:
    """Four layers of 4 MiB, 10 ms a sample forward and 20 backward."""
    others = {"embed": ("head",), "head": ("embed",)} if tied else {}
    layers = tuple(
        Layer(
            name=n, num_params=MIB, param_bytes=4 * MIB, output_bytes_per_sample=1000, tied=others.get(n, ())
        )
        for n in LAYERS
    )
    timings = tuple(
        Timing(layer=n, kind="k", micro_batch=b, forward_s=seconds(0.01 * b), backward_s=seconds(0.02 * b))
        for n in LAYERS
        for b in (1, 8)
    )
    return Profile(model="four", layers=layers, timings=timings)


def seconds(value: float) -> Figure:
    return Figure(value=value, source="measured")


def model(bytes_per_s: float = 12.5e6, *, tied: bool = False) -> CostModel:
    ways = {("a", "a"): 4e9, ("b", "b"): 4e9, ("a", "b"): bytes_per_s}
    fleet = Fleet(
        devices=tuple(Device(name=n, kind="k") for n in NAMES),
        links=tuple(Link(a=a, b=b, curve=line(1e-4, rate)) for (a, b), rate in ways.items()),
    )
    return CostModel(fleet=fleet, profile=profile(tied=tied))


def shared() -> Plan:
    """Two stages: the first on both devices of host a and both of b, the second on one of each."""
    half = len(LAYERS) // 2
    first, second = " ".join(LAYERS[:half]), " ".join(LAYERS[half:])
    return plan_of(
        (8, (stage(first, ("a/0", 2), ("a/1", 2)), stage(second, ("a/1", 4)))),
        (8, (stage(first, ("b/0", 2), ("b/1", 2)), stage(second, ("b/1", 4)))),
        schedule="1f1b",
    )


def test_layers_with_the_same_holders_are_one_set() -> None:
    half = len(LAYERS) // 2
    sets = gradient_sets(model(), shared())
    assert {k: sum(v) for k, v in sets.items()} == {
        NAMES: half * 4 * MIB,
        ("a/1", "b/1"): (len(LAYERS) - half) * 4 * MIB,
    }


def test_tied_layers_are_summed_by_the_holders_of_all() -> None:
    """The head's weights are those of the embedding, whose stage is on all four."""
    sets = gradient_sets(model(tied=True), shared())
    assert set(sets) == {NAMES, ("a/1", "b/1")}
    first, last = " ".join(LAYERS[:2]), " ".join(LAYERS[2:])
    cut = plan_of((4, (stage(first, ("a/0", 4)), stage(last, ("b/0", 4)))), schedule="1f1b")
    assert set(gradient_sets(model(tied=True), cut)) == {("a/0", "b/0")}
    assert gradient_sets(model(), cut) == {}


def test_each_set_has_its_groups_and_its_seconds() -> None:
    found = with_groups(model(), shared())
    everyone, pair = reductions_of(found, NAMES), reductions_of(found, ("b/1", "a/1"))
    exchange = exchange_of(everyone, NAMES)
    assert exchange is not None and set(exchange.groups) == {("a/0", "a/1"), ("b/0", "b/1")}
    assert all(r.among == ("a/1", "b/1") for r in pair) and pair
    price = sums_of(model().network, found)
    assert price(NAMES, 8e6, 1) == exchange_seconds(8e6, exchange, model().fleet)
    assert price(("a/0", "b/1"), 8e6, 1) == model().network.flat_all_reduce_s(("a/0", "b/1"), 8e6)


def test_a_plan_that_says_how_stays_as_it_is() -> None:
    found = with_groups(model(), shared())
    assert with_groups(model(1e9), found, sums="ring") is found


def test_groups_make_the_step_shorter_and_compression_is_told() -> None:
    plain = with_groups(model(), shared(), sums="ring")
    groups = with_groups(model(), shared())
    small = with_groups(model(), shared(), compress=("int8",))
    seconds = [evaluate(model(), p).step_s for p in (plain, groups, small)]
    assert seconds == sorted(seconds, reverse=True) and seconds[2] < 0.8 * seconds[1]
    assert not plain.inexact and not groups.inexact and "int8" in small.inexact[0]


@pytest.mark.parametrize("names", [("a/0", "a/1"), ("a/0",)])
def test_what_stays_inside_a_host_is_not_written_down(names: tuple[str, ...]) -> None:
    every = " ".join(LAYERS)
    plan = plan_of((4, (stage(every, *((n, 4 // len(names)) for n in names)),)))
    assert with_groups(model(), plan).reductions == ()
