"""Sums over any groups, lanes and parts: exact, and the same bits on every device."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evener.core.exchange import LOSSLESS, exchange_of
from evener.core.plan import Reduction
from tests.mailboxes import Post, wires

BOUNDS = {torch.float32: 1e-6, torch.float64: 1e-12}


@st.composite
def cases(draw):
    """Groups of 1 to 3, up to 3 lanes in any parts, any slices and order, more pieces than rooms."""
    groups = draw(st.lists(st.integers(1, 3), min_size=2, max_size=3))
    names = [[f"h{i}/{m}" for m in range(n)] for i, n in enumerate(groups)]
    parts = draw(st.lists(st.integers(0, 5), min_size=1, max_size=3).filter(any))
    reductions = [Reduction(devices=tuple(g), transport="gloo") for g in names if len(g) > 1]
    for part in parts:
        lane = draw(st.permutations([draw(st.sampled_from(g)) for g in names]))
        adds = draw(st.lists(st.integers(0, 3), min_size=len(lane), max_size=len(lane)).filter(any))
        told = {d: float(k) for d, k in zip(lane, adds, strict=True)}
        packing = draw(st.sampled_from([None, LOSSLESS]))
        reductions.append(
            Reduction(devices=tuple(lane), transport="gloo", part=float(part), adds=told, compression=packing)
        )
    devices = draw(st.permutations([d for g in names for d in g]))
    sizes = draw(st.lists(st.integers(1, 40), min_size=1, max_size=9))
    dtype = draw(st.sampled_from(list(BOUNDS)))
    return reductions, devices, sizes, dtype, draw(st.booleans())


@settings(max_examples=40, deadline=None)
@given(cases())
def test_every_grouping_gives_the_sum(case) -> None:
    reductions, devices, sizes, dtype, shares = case
    exchange = exchange_of(reductions, devices)
    assert exchange is not None
    made = wires(exchange, Post(), shares=shares)
    draws = torch.Generator().manual_seed(len(devices))
    buffers = {d: [torch.randn(n, dtype=dtype, generator=draws) for n in sizes] for d in devices}
    expected = [sum(buffers[d][i].double() for d in devices) for i in range(len(sizes))]
    pending = [
        made[d].all_reduce(b, f"step 0, bucket {i}") for d in devices for i, b in enumerate(buffers[d])
    ]
    for p in pending:
        p.wait()
    for wire in made.values():
        wire.close()
    for i, wanted in enumerate(expected):
        first = buffers[devices[0]][i]
        scale = max(float(wanted.norm()), 1.0)
        assert float((first.double() - wanted).norm()) <= BOUNDS[dtype] * scale
        assert all(torch.equal(buffers[d][i], first) for d in devices)
