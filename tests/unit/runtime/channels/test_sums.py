"""Sums of a few numbers over channels, here between threads."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from evener.errors import PeerLostError, ReductionMismatchError
from evener.runtime.channels import channel
from evener.runtime.channels.channel import JobChannel, open_channel
from evener.runtime.channels.local import Hub
from evener.runtime.channels.sums import ChannelWire
from evener.runtime.ranks import Ranks

DEVICES = ("h/a", "h/b", "h/c")


@pytest.fixture(params=["local", "shared", "tcp"])
def ends(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[JobChannel]]:
    monkeypatch.setattr(channel, "IS_AVAILABLE", request.param == "shared")
    hub = Hub() if request.param == "local" else None
    store = dist.HashStore()
    opened = [open_channel(Ranks(DEVICES, here), store, hub=hub, timeout_s=20) for here in DEVICES]
    yield opened
    for end in opened:
        end.close()


def on_each(ends: list[JobChannel], work: Callable[[ChannelWire, int], object]) -> list:
    """`work(wire, number)` on all devices at the same time."""
    wires = [ChannelWire(end, Ranks(DEVICES, end.here)) for end in ends]
    with ThreadPoolExecutor(len(ends)) as pool:
        return list(pool.map(work, wires, range(len(wires))))


def test_all_get_the_same_sum_and_may_have_several_on_their_way(ends: list[JobChannel]) -> None:
    values = torch.randn(3, 2, 17, generator=torch.Generator().manual_seed(0))

    def work(wire: ChannelWire, number: int) -> torch.Tensor:
        first, second = values[number]
        pending = [wire.all_reduce(first, "step 3, tally"), wire.all_reduce(second, "step 3, norm")]
        for p in pending:
            p.wait()
        pending[0].wait()  # again: nothing is added twice
        return torch.stack([first, second])

    wanted = values[0] + values[1] + values[2]
    found = on_each(ends, work)
    assert torch.equal(found[0], wanted)  # to the bit, and so everywhere
    assert torch.equal(found[1], wanted) and torch.equal(found[2], wanted)


def test_other_numbers_of_values_are_an_error(ends: list[JobChannel]) -> None:
    def work(wire: ChannelWire, number: int) -> str:
        with pytest.raises(ReductionMismatchError) as error:
            wire.all_reduce(torch.ones(1 + (number == 1)), "step 3, tally").wait()
        return str(error.value)

    said = on_each(ends, work)
    assert said[0].startswith("h/a and h/b add different numbers of values in sum of step 3, tally")


def test_a_wait_for_a_device_that_adds_nothing_can_be_ended(ends: list[JobChannel]) -> None:
    pending = ChannelWire(ends[0], Ranks(DEVICES, "h/a")).all_reduce(torch.ones(1), "step 3, tally")
    threading.Timer(0.05, lambda: ends[0].abort("h/b has shown no sign of life for 1 s")).start()
    with pytest.raises(PeerLostError, match="no sign of life"):
        pending.wait()
