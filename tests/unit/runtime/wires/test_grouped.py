"""A wire over groups: what it does with losses, lost devices and devices that disagree."""

import threading
import time

import pytest
import torch

from evener.core.exchange import LOSSLESS, PIECE_BYTES, ROW, exchange_of
from evener.core.exchange_seconds import PACKINGS
from evener.core.plan import Reduction
from evener.errors import EvenerError, PeerLostError, ReductionMismatchError
from evener.runtime.compression.blocks import BLOCK
from evener.runtime.compression.codec import NAMES as NAMES_OF_CODECS
from tests.mailboxes import Post, wires

NAMES = ("a/0", "a/1", "b/0", "b/1")
INSIDE = (
    Reduction(devices=("a/0", "a/1"), transport="gloo"),
    Reduction(devices=("b/0", "b/1"), transport="gloo"),
)


def lanes(compression: str | None = None) -> tuple[Reduction, ...]:
    return (
        *INSIDE,
        Reduction(devices=("a/0", "b/0"), transport="gloo", part=0.5, compression=compression),
        Reduction(devices=("a/1", "b/1"), transport="gloo", part=0.5, compression=compression),
    )


def summed(buffers: dict[str, torch.Tensor], compression: str | None, tail: int = 0, steps: int = 1):
    """Every device's sum, in place, `steps` times over with the same values; the mean of the sums."""
    made = wires(exchange_of(lanes(compression), NAMES), Post())
    total = 0
    for step in range(steps):
        own = {d: b.clone() for d, b in buffers.items()}
        pending = [w.all_reduce(own[d], f"step {step}, bucket 0", exact_tail=tail) for d, w in made.items()]
        for p in pending:
            p.wait()
        assert all(torch.equal(own["a/0"].nan_to_num(), b.nan_to_num()) for b in own.values())
        total = total + own["a/0"]
    for wire in made.values():
        wire.close()
    return total / steps


def randoms(size: int = 5000) -> dict[str, torch.Tensor]:
    return {d: torch.randn(size, generator=torch.Generator().manual_seed(i)) for i, d in enumerate(NAMES)}


@pytest.mark.parametrize(
    ("compression", "bound"), [("bf16", 5e-3), ("fp16", 6e-4), ("int8", 2e-2), ("int4", 0.3)]
)
def test_a_compressed_sum_is_near_and_its_tail_exact(compression: str, bound: float) -> None:
    buffers = randoms()
    expected = sum(buffers.values())
    found = summed(buffers, compression, tail=7)
    error = (found - expected)[:-7].norm() / expected.norm()
    assert 0 < error < bound
    assert torch.allclose(found[-7:], expected[-7:], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("compression", ["int8", "int4", "top1%"])
def test_kept_errors_come_later(compression: str) -> None:
    """Over many steps the mean is nearer than one step: what is lost in one is in the next."""
    buffers = randoms(800)
    expected = sum(buffers.values())
    once = (summed(buffers, compression) - expected).norm()
    often = (summed(buffers, compression, steps=60) - expected).norm()
    assert often < once / 5 or (compression == "top1%" and often < once / 1.5)


@pytest.mark.parametrize("size", [1, 7, 5000, 300_000])
def test_packed_without_loss_the_sum_has_the_same_bits(size: int) -> None:
    buffers = randoms(size)
    assert torch.equal(summed(buffers, LOSSLESS, tail=1), summed(buffers, None))


@pytest.mark.parametrize("compression", [None, LOSSLESS, *NAMES_OF_CODECS])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_arrives_as_such(compression: str | None, value: float) -> None:
    buffers = randoms(3000)
    buffers["b/1"][1234] = value
    found = summed(buffers, compression)
    assert not found.isfinite().all()
    assert not found[1234 - 300 : 1234 + 300].isfinite().all()


@pytest.mark.parametrize("compression", NAMES_OF_CODECS)
@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-38, 1e-30, 1e30])
def test_values_of_any_size_stay_finite(compression: str, size: float) -> None:
    buffers = {d: b * size for d, b in randoms(600).items()}
    found = summed(buffers, compression, steps=3)
    assert found.isfinite().all()
    assert found.abs().max() <= 1.2 * 4 * max(float(b.abs().max()) for b in buffers.values())


def test_every_codec_has_a_price() -> None:
    assert set(NAMES_OF_CODECS) == set(PACKINGS)


@pytest.mark.parametrize("compression", ["int8", "int4", "top1%", "powersgd2"])
@pytest.mark.parametrize("value", [1.0, float("nan"), float("inf")])
def test_a_step_that_does_not_count_leaves_kept_errors_as_they_were(compression: str, value: float) -> None:
    """After two steps of which the second is skipped, kept errors are those after the first alone."""

    def kept_after(*steps: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        made = wires(exchange_of(lanes(compression), NAMES), Post())
        for number, buffers in enumerate(steps):
            own = {d: b.clone() for d, b in buffers.items()}
            pending = [w.all_reduce(own[d], f"step {number}, bucket 0") for d, w in made.items()]
            for p in pending:
                p.wait()
            for wire in made.values():
                wire.settle(counts=number == 0, factor=1.0 if number == 0 else 0.5)
                wire.close() if number == len(steps) - 1 else None
        found = made["a/0"].kept_errors()
        assert found and all(x.isfinite().all() for x in found)
        return found

    strange = randoms(900)
    strange["b/0"][17] = value
    once, twice = kept_after(randoms(900)), kept_after(randoms(900), strange)
    assert any(x.any() for x in once)
    assert all(torch.equal(0.5 * x, y) for x, y in zip(once, twice, strict=True))


def fails(wire, buffer: torch.Tensor) -> EvenerError:
    with pytest.raises(EvenerError) as e:
        wire.all_reduce(buffer, "step 3, bucket 1").wait()
    return e.value


def test_a_lost_device_ends_every_wait_and_all_later_sums() -> None:
    post = Post()
    made = wires(exchange_of(lanes(), NAMES), post)
    pending = [made[d].all_reduce(torch.ones(PIECE_BYTES), "step 3, bucket 1") for d in NAMES[:3]]
    threading.Timer(0.2, post.lose, ("b/1",)).start()
    with pytest.raises(PeerLostError, match="step 3, bucket 1"):
        pending[2].wait()
    assert isinstance(fails(made["b/0"], torch.ones(1)), PeerLostError)


@pytest.mark.parametrize(
    ("theirs", "told"),
    [(torch.ones(9), "torch.float32"), (torch.ones(8, dtype=torch.float64), "float64")],
    ids=["size", "dtype"],
)
@pytest.mark.parametrize("shares", [True, False])
def test_devices_that_disagree_are_told_so(theirs: torch.Tensor, told: str, shares: bool) -> None:
    made = wires(exchange_of(lanes(), NAMES), Post(), shares=shares)
    own = {d: torch.ones(8) for d in NAMES} | {"b/1": theirs}
    pending = {d: made[d].all_reduce(own[d], "step 0, bucket 0") for d in NAMES}
    with pytest.raises(ReductionMismatchError) as e:
        pending["b/0"].wait()
    here, there = e.value.numbers.split(" here, ")
    assert "torch.float32" in here and told in there and here != there.removesuffix(" there")


def test_time_between_groups_is_that_in_which_any_piece_was_there() -> None:
    buffers = randoms(300_000)
    made = wires(exchange_of(lanes(), NAMES), Post())
    start = time.perf_counter()
    pending = [w.all_reduce(buffers[d], "step 0, bucket 0") for d, w in made.items()]
    for p in pending:
        p.wait()
    whole = time.perf_counter() - start
    for wire in made.values():
        assert 0 < wire.between_s(time.perf_counter() - start) <= whole
        assert wire.between_s(0.0) == 0.0
        wire.close()


@pytest.mark.parametrize("shares", [True, False])
def test_members_without_common_memory_are_told_once_by_the_first_of_them(shares: bool) -> None:
    made = wires(exchange_of(lanes(), NAMES), Post(), shares=shares)
    told = {device: wire.note for device, wire in made.items() if wire.note}
    assert set(told) == (set() if shares else {"a/0", "b/0"})
    assert shares or told["a/0"].startswith("a/0, a/1 share no memory")
    for wire in made.values():
        wire.close()


def test_sums_are_cut_where_blocks_of_int8_end() -> None:
    assert ROW == BLOCK
