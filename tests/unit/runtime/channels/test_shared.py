"""Rings and sockets between two ends, here both in this process: they cannot tell."""

import gc
import os
import socket
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from evener.errors import PeerLostError, ReductionMismatchError
from evener.runtime.channels import shared
from evener.runtime.channels.channel import JobChannel, open_channel
from evener.runtime.channels.ring import FIRST_RING_BYTES
from evener.runtime.ranks import Ranks

CPU = torch.device("cpu")
DEVICES = ("h/a", "h/b", "h/c")


@pytest.fixture
def ends() -> Iterator[list[JobChannel]]:
    store = dist.HashStore()
    opened = [open_channel(Ranks(DEVICES, here), store, timeout_s=0.2) for here in DEVICES]
    yield opened
    for channel in opened:
        channel.close()


def test_messages_arrive_in_order_in_new_memory(ends: list[JobChannel]) -> None:
    a, b, _ = ends
    for i in range(30):
        a.send((torch.full((1000, i % 7), i), torch.tensor(float(i), requires_grad=True)), "h/b", f"k{i}")
    for i in range(30):
        x, y = b.receive("h/a", f"k{i}", device=CPU).wait()
        assert x.shape == (1000, i % 7) and (x == i).all()
        assert y.is_leaf and y.requires_grad and float(y.detach()) == i
    assert "shared memory" in a.reasons["h/b"]


def test_what_was_sent_may_be_changed_at_once(ends: list[JobChannel]) -> None:
    a, b, _ = ends
    x = torch.ones(10)
    a.send((x,), "h/b", "k").wait()
    x.zero_()
    assert b.receive("h/a", "k", device=CPU).wait()[0].sum() == 10


def test_large_messages_both_ways_need_no_receiver(ends: list[JobChannel]) -> None:
    """Each side sends several times what a ring holds before either side takes anything."""
    a, b, _ = ends
    big = torch.arange(FIRST_RING_BYTES // 4, dtype=torch.float32)  # one alone fills the first ring
    for i in range(4):
        a.send((big + i,), "h/b", f"k{i}")
        b.send((big - i,), "h/a", f"k{i}")
    for i in range(4):
        assert torch.equal(b.receive("h/a", f"k{i}", device=CPU).wait()[0], big + i)
        assert torch.equal(a.receive("h/b", f"k{i}", device=CPU).wait()[0], big - i)


def test_more_headers_than_a_socket_holds_go_out_with_any_later_call(
    ends: list[JobChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "_SEND_BUFFER_BYTES", 2**14)
    a, b, c = ends
    sent = [a.send((torch.tensor(i),), "h/b", f"k{i}") for i in range(500)]
    assert type(sent[0]) is not type(sent[-1]), "some had no room"
    with pytest.raises(PeerLostError, match=r"h/b did not take \d+ messages within 0.2 s"):
        sent[-1].wait()
    for i in range(500):
        if i % 10 == 9:
            a.send((), "h/c", "to another")
        elif i % 10 == 4:
            c.send((), "h/a", "from another")
            a.receive("h/c", "from another", device=CPU).wait()
        assert int(b.receive("h/a", f"k{i}", device=CPU).wait()[0]) == i
    sent[-1].wait()


def test_a_stranger_at_the_door_is_ignored(ends: list[JobChannel]) -> None:
    a, b, _ = ends
    door = b._place.address
    for hello in (b"", b"\xff\xfe", b"h/z"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.connect(f"\0{door}")
            if hello:
                stranger.send(hello)
    a.send((torch.ones(1),), "h/b", "k")
    assert b.receive("h/a", "k", device=CPU).wait()[0] == 1


@pytest.mark.parametrize("packet", [b"short", bytes(24) + b"no header", (2**20).to_bytes(8, "little") * 3])
def test_a_packet_that_is_no_message_is_an_error(ends: list[JobChannel], packet: bytes) -> None:
    a, b, _ = ends
    a.send((), "h/b", "k")
    b.receive("h/a", "k", device=CPU).wait()
    a._senders["h/b"]._socket.send(packet)
    with pytest.raises(ReductionMismatchError, match="what h/a sent is no message"):
        b.receive("h/a", "k", device=CPU).wait()


def test_nothing_stays_open() -> None:
    def descriptors() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    store = dist.HashStore()
    a, b = (open_channel(Ranks(DEVICES, here), store) for here in DEVICES[:2])
    for i in range(3):
        a.send((torch.ones(FIRST_RING_BYTES),), "h/b", f"k{i}")
        b.send((torch.ones(5),), "h/a", f"k{i}")
    b.receive("h/a", "k0", device=CPU).wait()
    assert descriptors() > before
    a.close()
    b.close()
    del a, b
    assert descriptors() == before
