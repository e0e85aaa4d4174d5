"""Which sums are tried on a job's links, and what is made of the seconds."""

import pytest
from msgspec.structs import replace

from evener.core.exchange import PIECE_BYTES
from evener.core.figures import line
from evener.core.fleet import Device, Fleet, Link
from evener.cost.exchange import choose_way, ways_of
from evener.policy.trials import trials_of, tried

NAMES = ("a/0", "a/1", "b/0", "b/1")


def fleet(rate: float = 125e6, names=NAMES) -> Fleet:
    links = [Link(a=h, b=h, curve=line(1e-5, 4e9)) for h in "ab"]
    return Fleet(
        devices=tuple(Device(name=n, kind="k") for n in names),
        links=(*links, Link(a="a", b="b", curve=line(1e-4, rate))),
    )


def names_of(found, of: Fleet, compress=()) -> list[str]:
    told = [(() if w.name == "ring" else w.reductions, w.name) for w in ways_of(of, NAMES, compress)]
    return [next(name for reductions, name in told if reductions == way) for way in found.ways]


def test_the_near_ways_are_tried_with_two_large_sizes() -> None:
    found = trials_of(fleet(), NAMES, (), 20_000_000)
    assert names_of(found, fleet()) == ["ring", "1 lane", "2 lanes"]
    assert found.sizes == (2**16, 4 * PIECE_BYTES, 8 * PIECE_BYTES) and found.repeats == 4
    assert found.why.startswith("ring, 1 lane, 2 lanes tried on the links for about ")


def test_what_is_far_slower_is_not_tried() -> None:
    found = trials_of(fleet(), NAMES, ("int8",), 20_000_000)
    assert "1 lane, int8" in names_of(found, fleet(), ("int8",))
    slow = trials_of(fleet(12.5e6), NAMES, ("int8",), 20_000_000)
    assert names_of(slow, fleet(12.5e6), ("int8",)) == ["1 lane, int8", "2 lanes, int8"]
    assert slow.why.endswith("; 3 slower ones not")


@pytest.mark.parametrize(("rate", "repeats"), [(125e6, 4), (20e6, 2), (12.5e6, 3), (8e6, 2), (5e6, 1)])
def test_slower_links_are_tried_with_less(rate: float, repeats: int) -> None:
    found = trials_of(fleet(rate), NAMES, (), 20_000_000)
    assert found.repeats == repeats
    assert len(found.ways) == 3
    assert sum((repeats + 1) * w.seconds(s) for w in ways_of(fleet(rate), NAMES) for s in found.sizes) <= 20.0


def test_a_link_too_slow_for_trials_is_told_so() -> None:
    found = trials_of(fleet(125e3), NAMES, (), 20_000_000)
    assert found.ways == () and "sums are not tried on the links: that takes" in found.why


def test_one_host_has_nothing_to_try() -> None:
    one = fleet(names=("a/0", "a/1", "b/0")).only(("a/0", "a/1"))
    assert trials_of(one, ("a/0", "a/1"), (), 20_000_000).ways == ()


def test_small_models_are_tried_with_what_they_have() -> None:
    assert trials_of(fleet(), NAMES, (), 1_000_000).sizes == (2**16, 1_000_000)


def test_what_was_tried_is_what_is_predicted_and_chosen() -> None:
    """By the formula one lane takes 0.17 s for 20 MB; tried it took longer than the ring."""
    before = fleet()
    assert choose_way(before, NAMES, [20e6]).way.name == "1 lane"
    trials = trials_of(before, NAMES, (), 20_000_000)
    rows = [[0.01, 0.1, 0.2], [0.01, 0.15, 0.3], [0.01, 0.31, 0.3]]
    after = replace(before, sums=tried(trials, NAMES, rows))
    choice = choose_way(after, NAMES, [20e6])
    assert choice.way.name == "ring"
    extrapolated = 0.2 + (20e6 - 8 * PIECE_BYTES) * 0.1 / (4 * PIECE_BYTES)
    assert choice.seconds["ring"] == pytest.approx(extrapolated)
    assert choice.seconds["2 lanes"] == pytest.approx(0.31), "less for more bytes is noise"
    assert after.only(("a/0", "b/0")).sums == ()
