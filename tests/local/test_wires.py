"""Sums over groups in real processes: exact, the same bits everywhere, and one message for every trouble."""

import os
import time
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist

from evener.core.exchange import exchange_of
from evener.core.plan import Reduction
from evener.errors import PeerLostError
from evener.runtime.wires.open import open_grouped
from evener.session.sockets import GroupSockets
from tests.local.pool import Pool

NAMES = ("a/0", "a/1", "b/0", "b/1")
INSIDE = (
    Reduction(devices=("a/0", "a/1"), transport="gloo"),
    Reduction(devices=("b/0", "b/1"), transport="gloo"),
)


def lane(*devices: str, part: float = 1.0, compression: str | None = None, **adds: float) -> Reduction:
    return Reduction(
        devices=devices,
        transport="gloo",
        part=part,
        compression=compression,
        adds={d: adds[d.partition("/")[0]] for d in devices} if adds else {},
    )


def wire_of(rank: int, names: Sequence[str], reductions: Sequence[Reduction], seed: int = 0):
    def new_group(devices: Sequence[str], backend: str) -> dist.ProcessGroup:
        return dist.new_group([names.index(d) for d in devices], backend=backend)

    exchange = exchange_of(reductions, names)
    assert exchange is not None
    return open_grouped(exchange, names[rank], seed, new_group)


def values(rank: int, size: int, dtype: torch.dtype, number: int = 0) -> torch.Tensor:
    return torch.randn(size, dtype=dtype, generator=torch.Generator().manual_seed(100 * number + rank))


def sums(rank: int, world_size: int, names, reductions, sizes, dtype) -> list[torch.Tensor]:
    wire = wire_of(rank, names, reductions)
    buffers = [values(rank, size, dtype, i) for i, size in enumerate(sizes)]
    pending = [wire.all_reduce(b, f"step 0, bucket {i}") for i, b in enumerate(buffers)]
    for p in pending:
        p.wait()
    return [b.numpy() for b in buffers]


GROUPINGS = {
    "two lanes": (NAMES, (*INSIDE, lane("a/0", "b/0", part=0.5), lane("a/1", "b/1", part=0.5))),
    "uneven lanes": (NAMES, (*INSIDE, lane("a/0", "b/1", part=0.9), lane("b/0", "a/1", part=0.1))),
    "one lane": (NAMES, (*INSIDE, lane("a/1", "b/0"))),
    "a part of zero": (NAMES, (*INSIDE, lane("a/0", "b/0"), lane("a/1", "b/1", part=0.0))),
    "one member adds nothing": (NAMES, (*INSIDE, lane("a/0", "b/0", a=0.0, b=1.0))),
    "interleaved": (
        ("a/0", "b/0", "a/1", "b/1"),
        (*INSIDE, lane("a/0", "b/0", part=0.5), lane("a/1", "b/1", part=0.5)),
    ),
    "packed without loss": (
        NAMES,
        (*INSIDE, *(lane(f"a/{i}", f"b/{i}", part=0.5, compression="lossless") for i in (0, 1))),
    ),
    "a host of one": (
        ("a/0", "a/1", "b/0"),
        (INSIDE[0], lane("a/0", "b/0", part=0.6), lane("a/1", "b/0", part=0.4)),
    ),
    "many lanes": (
        NAMES,
        (*INSIDE, *(lane(f"a/{i % 2}", f"b/{i // 2 % 2}", part=1.0 + i % 3) for i in range(7))),
    ),
    "three hosts": (
        ("a/0", "b/0", "c/0", "c/1"),
        (
            Reduction(devices=("c/0", "c/1"), transport="gloo"),
            lane("a/0", "b/0", "c/0", part=0.3, a=0.5, b=0.3, c=0.2),
            lane("a/0", "c/1", "b/0", part=0.7),
        ),
    ),
}


@pytest.mark.parametrize("grouping", GROUPINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_grouped_sum_is_exact_and_the_same_everywhere(
    pool: Pool, grouping: str, dtype: torch.dtype
) -> None:
    names, reductions = GROUPINGS[grouping]
    sizes = (1, 7, 1_500_001)
    found = pool.run(sums, len(names), names, reductions, sizes, dtype)
    for i, size in enumerate(sizes):
        expected = sum(values(r, size, dtype, i).double() for r in range(len(names)))
        first = torch.from_numpy(found[0][i])
        bound = 1e-6 if dtype == torch.float32 else 1e-12
        assert (first.double() - expected).norm() <= bound * expected.norm()
        assert all(torch.equal(torch.from_numpy(f[i]), first) for f in found)


def sum_until_lost(rank: int, world_size: int, names, reductions) -> tuple[str, float]:
    """Device b/1 ends in mid-exchange; the others sum on until they learn of it, and then wake the rest."""
    sockets = GroupSockets()
    with sockets.opening():
        wire = wire_of(rank, names, reductions)
    wire.all_reduce(torch.ones(1000), "step 0, bucket 0").wait()
    start = time.monotonic()
    pending = [wire.all_reduce(torch.ones(2_000_000), f"step 1, bucket {i}") for i in range(20)]
    if names[rank] == "b/1":
        pending[0].wait()
        os._exit(1)
    try:
        for p in pending:
            p.wait()
    except PeerLostError as e:
        told = str(e)
    else:
        told = ""
    sockets.shut()  # as a generation that ends does
    return told, time.monotonic() - start


@pytest.mark.parametrize("compression", [None, "int8"])
def test_a_device_lost_in_mid_exchange_wakes_all(pool: Pool, compression: str | None) -> None:
    halves = (
        lane("a/0", "b/0", part=0.5, compression=compression),
        lane("a/1", "b/1", part=0.5, compression=compression),
    )
    *others, lost = pool.outcomes(sum_until_lost, 4, NAMES, (*INSIDE, *halves))
    assert "died" in lost.error, "\n".join((*(o.error or str(o.value) for o in others), lost.error))
    for outcome in others:
        assert outcome.ok, outcome.error
        told, seconds = outcome.value
        assert "another device left or went silent" in told and seconds < 10
