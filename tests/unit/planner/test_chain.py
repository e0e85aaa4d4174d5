"""The cut of one chain: against all cuts, and the worked number."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.errors import NoPlanFitsError
from evener.planner.chain import cut_chain

whole = st.integers(0, 9).map(float)


@st.composite
def chains(draw: st.DrawFn) -> list[list[float]]:
    layers = draw(st.integers(1, 7))
    stages = draw(st.integers(1, min(4, layers)))
    return [draw(st.lists(whole, min_size=layers, max_size=layers)) for _ in range(stages)]


def value(costs: list[list[float]], sizes: tuple[int, ...]) -> tuple[float, float]:
    at, sums = 0, []
    for row, size in zip(costs, sizes, strict=True):
        sums.append(sum(row[at : at + size]))
        at += size
    return max(sums), sum(sums)


@given(chains())
def test_no_cut_has_a_smaller_maximum_and_none_of_those_a_smaller_total(costs: list[list[float]]) -> None:
    found = cut_chain(costs)
    layers, stages = len(costs[0]), len(costs)
    edges = itertools.combinations(range(1, layers), stages - 1)
    every = [tuple(b - a for a, b in itertools.pairwise((0, *e, layers))) for e in edges]
    assert min(found) >= 1 and sum(found) == layers
    assert value(costs, found) == min(value(costs, sizes) for sizes in every)


@pytest.mark.parametrize(("slow", "cut"), [(1.0, (4, 4)), (3.0, (6, 2)), (100.0, (7, 1))])
def test_a_slow_stage_gets_fewer_layers(slow: float, cut: tuple[int, ...]) -> None:
    assert cut_chain(([1.0] * 8, [slow] * 8)) == cut


def test_more_stages_than_layers() -> None:
    with pytest.raises(NoPlanFitsError, match="2 layers cannot fill 3 stages"):
        cut_chain([[1.0, 1.0]] * 3)
