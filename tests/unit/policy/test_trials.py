"""Which sums are tried on a job's links, and what is made of the seconds."""

import pytest
from msgspec.structs import replace

from evener.core.exchange import PIECE_BYTES
from evener.core.figures import line
from evener.core.fleet import Device, Fleet, Link
from evener.cost.exchange import choose_way, ways_of
from evener.policy.trials import MOST_REPEATS, Trials, again, trials_of, tried

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


EXACT = ["ring", "1 lane", "1 lane, lossless", "2 lanes", "2 lanes, lossless"]


def spent_s(look: Trials, rate: float) -> float:
    ways = ways_of(fleet(rate), NAMES)
    assert len(ways) == len(look.ways)
    return sum((look.repeats + 1) * way.seconds(size) for way in ways for size in look.sizes)


def test_the_near_ways_are_looked_at_once() -> None:
    found = trials_of(fleet(), NAMES, (), 20_000_000)
    assert names_of(found, fleet()) == EXACT
    assert found.sizes == (2**16, 4 * PIECE_BYTES, 8 * PIECE_BYTES) and found.repeats == 2
    assert found.why == f"{'; '.join(EXACT)} tried on the links, for at most 30 s"


def test_what_is_far_slower_is_not_tried() -> None:
    found = trials_of(fleet(), NAMES, ("int8",), 20_000_000)
    assert "1 lane, int8" in names_of(found, fleet(), ("int8",))
    slow = trials_of(fleet(12.5e6), NAMES, ("int8",), 20_000_000)
    assert names_of(slow, fleet(12.5e6), ("int8",)) == ["1 lane, int8", "2 lanes, int8"]
    assert slow.why.endswith("; 5 slower ones not")


@pytest.mark.parametrize(
    ("rate", "pieces", "repeats"), [(125e6, 8, 2), (40e6, 8, 2), (12.5e6, 4, 2), (6e6, 4, 1), (3e6, 2, 1)]
)
def test_slower_links_are_looked_at_with_less(rate: float, pieces: int, repeats: int) -> None:
    found = trials_of(fleet(rate), NAMES, (), 20_000_000)
    assert (found.sizes[-1], found.repeats) == (pieces * PIECE_BYTES, repeats)
    assert spent_s(found, rate) <= 18.0


def test_a_link_too_slow_for_trials_is_told_so() -> None:
    found = trials_of(fleet(125e3), NAMES, (), 20_000_000)
    assert found.ways == () and "sums are not tried on the links: a first look takes" in found.why


def test_one_host_has_nothing_to_try() -> None:
    one = fleet(names=("a/0", "a/1", "b/0")).only(("a/0", "a/1"))
    assert trials_of(one, ("a/0", "a/1"), (), 20_000_000).ways == ()


def test_small_models_are_tried_with_what_they_have() -> None:
    assert trials_of(fleet(), NAMES, (), 1_000_000).sizes == (2**16, 1_000_000)


def looked_at(*large_s: float, rate: float = 12.5e6) -> tuple[Trials, list]:
    """A first look in which 8.4 MB took `large_s` of the five ways."""
    look = trials_of(fleet(rate), NAMES, (), 20_000_000)
    assert look.sizes == (2**16, 4 * PIECE_BYTES) and look.repeats == 2
    return look, [[[0.01] * look.repeats, [s] * look.repeats] for s in large_s]


def test_nearly_equal_ways_are_tried_again_with_more_and_more_often() -> None:
    look, samples = looked_at(0.20, 0.14, 0.16, 0.12, 0.13)
    found = again(look, samples)
    assert names_of(found, fleet()) == ["1 lane", "2 lanes", "2 lanes, lossless"]
    assert found.sizes == (2**16, 4 * PIECE_BYTES, 8 * PIECE_BYTES) and found.repeats == MOST_REPEATS


def test_the_second_look_takes_what_time_is_left() -> None:
    """One of 30 s: a look of 12.75 s leaves 17.25, a turn of two ways with both large sizes takes 4.21."""
    look, samples = looked_at(1.0, 0.9, 0.65, 0.9, 0.75)
    found = again(look, samples)
    assert names_of(found, fleet()) == ["1 lane, lossless", "2 lanes, lossless"]
    turn_s = sum((0.65 + 0.75) * size / (4 * PIECE_BYTES) for size in found.sizes)
    assert found.repeats * turn_s <= 30.0 - 3 * (0.05 + 4.2) < (found.repeats + 1) * turn_s


def test_without_time_for_more_one_size_is_tried_again_or_nothing() -> None:
    look, samples = looked_at(1.5, 1.4, 1.0, 1.4, 1.0)
    assert again(replace(look, budget_s=23.0), samples).sizes == look.sizes
    assert again(replace(look, budget_s=20.0), samples).ways == ()


def test_what_was_tried_is_what_is_predicted_and_chosen() -> None:
    """By the formula lanes without loss take the least for 20 MB; tried they took longer than the ring."""
    before = fleet()
    assert choose_way(before, NAMES, [20e6]).way.name == "2 lanes, lossless"
    look, samples = looked_at(0.10, 0.15, 0.30, 0.31, 0.4)
    second = again(look, samples)
    assert names_of(second, before) == ["ring"]
    more = [[[0.01] * 4, [0.1, 0.11, 0.5, 0.1], [0.2, 0.3, 0.2, 0.2]]]
    after = replace(before, sums=tried(NAMES, [(look, samples), (second, more)]))
    choice = choose_way(after, NAMES, [20e6])
    assert choice.way.name == "ring"
    extrapolated = 0.2 + (20e6 - 8 * PIECE_BYTES) * 0.1 / (4 * PIECE_BYTES)
    assert choice.seconds["ring"] == pytest.approx(extrapolated)
    assert after.only(("a/0", "b/0")).sums == ()


def test_less_for_more_bytes_is_noise() -> None:
    look, samples = looked_at(0.10, 0.15, 0.30, 0.31, 0.4)
    samples[1][0] = [0.2, 0.2]
    sums = {s.way: s.curve for s in tried(NAMES, [(look, samples)])}
    assert sorted(c.seconds(4 * PIECE_BYTES) for c in sums.values()) == [0.1, 0.2, 0.3, 0.31, 0.4]
