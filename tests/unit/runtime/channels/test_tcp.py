"""Streams between two ends, here both in this process: they cannot tell."""

import gc
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace

from evener.errors import EnvironmentBrokenError, PeerLostError, ReductionMismatchError
from evener.runtime.channels import ahead, channel, doors
from evener.runtime.channels.channel import JobChannel, open_channel
from evener.runtime.channels.frames import Frame, Frames, beyond, framed
from evener.runtime.channels.local import Hub
from evener.runtime.channels.messages import layout_of, pack
from evener.runtime.channels.stop import Stop
from evener.runtime.ranks import Ranks

CPU = torch.device("cpu")
DEVICES = ("h/a", "h/b", "h/c")
BIG = torch.arange(2**21, dtype=torch.float32)  # 8 MiB: more than a socket keeps


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[JobChannel]]:
    monkeypatch.setattr(channel, "IS_AVAILABLE", False)
    store = dist.HashStore()
    opened = [open_channel(Ranks(DEVICES, here), store, timeout_s=0.3) for here in DEVICES]
    yield opened
    for end in opened:
        end.close()


def take(end: JobChannel, source: str, key: str) -> tuple[torch.Tensor, ...]:
    return end.receive(source, key, device=CPU).wait()


def test_messages_arrive_in_order_in_new_memory(ends: list[JobChannel]) -> None:
    a, b, _ = ends
    for i in range(30):
        a.send((torch.full((1000, i % 7), i), torch.tensor(float(i), requires_grad=True)), "h/b", f"k{i}")
    for i in range(30):
        x, y = take(b, "h/a", f"k{i}")
        assert x.shape == (1000, i % 7) and (x == i).all()
        assert y.is_leaf and y.requires_grad and float(y.detach()) == i
    assert "TCP" in a.reasons["h/b"]


def test_each_tensor_has_memory_of_its_own(ends: list[JobChannel]) -> None:
    """In-place work on one must not look to autograd like work on another."""
    a, b, _ = ends
    a.send((torch.ones(3), torch.ones(3)), "h/b", "k")
    x, y = take(b, "h/a", "k")
    x.add_(1)
    assert y.sum() == 3 and y._version == 0


def test_large_messages_both_ways_need_no_receiver(ends: list[JobChannel]) -> None:
    a, b, _ = ends
    sent = []
    for i in range(4):
        sent += [a.send((BIG + i,), "h/b", f"k{i}"), b.send((BIG - i, BIG[:0]), "h/a", f"k{i}")]
    for i in range(4):
        assert torch.equal(take(b, "h/a", f"k{i}")[0], BIG + i)
        x, empty = take(a, "h/b", f"k{i}")
        assert torch.equal(x, BIG - i) and empty.shape == (0,)
    for pending in sent:
        pending.wait()


def test_what_was_sent_may_be_changed_at_once(ends: list[JobChannel]) -> None:
    a, b, _ = ends
    x = BIG.clone()
    pending = a.send((x,), "h/b", "k")
    x.zero_()
    assert torch.equal(take(b, "h/a", "k")[0], BIG)
    pending.wait()


def test_after_a_large_message_the_next_is_read_before_it_is_asked_for(ends: list[JobChannel]) -> None:
    a, b, _ = ends
    first = a.send((BIG,), "h/b", "k0")
    take(b, "h/a", "k0")
    first.wait()
    a.send((BIG,), "h/b", "k1").wait()  # ends although nobody asks: the other's thread reads


def test_what_is_read_ahead_is_bounded(ends: list[JobChannel], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "MAX_AHEAD_BYTES", 2**22)
    a, b, _ = ends
    a.send((BIG,), "h/b", "k0")
    take(b, "h/a", "k0")
    pending = [a.send((BIG,), "h/b", f"k{i}") for i in range(1, 5)]
    with pytest.raises(PeerLostError, match=r"h/b did not take k4 within 0.3 s"):
        pending[-1].wait()
    for i in range(1, 5):
        assert torch.equal(take(b, "h/a", f"k{i}")[0], BIG)
    pending[-1].wait()


def raised_in_a_thread(work: Callable[[], object]) -> Callable[[], Exception | None]:
    """Starts `work`; gives what it raised when it has ended."""
    found: list[Exception | None] = []

    def run() -> None:
        try:
            work()
            found.append(None)
        except Exception as e:
            found.append(e)

    thread = threading.Thread(target=run)
    thread.start()

    def ended() -> Exception | None:
        thread.join(2)
        assert not thread.is_alive(), "it still waits"
        return found[0]

    return ended


@pytest.mark.parametrize("way", ["abort", "close"])
@pytest.mark.parametrize("wait", ["local", "shared", "first", "next", "ahead", "kept", "place"])
def test_every_wait_ends_at_once(wait: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From another thread, as a watchdog does; the timeout is far away."""
    monkeypatch.setattr(channel, "IS_AVAILABLE", wait == "shared")
    hub = Hub() if wait == "local" else None
    store = dist.HashStore()
    names = DEVICES[:1] if wait == "place" else DEVICES[:2]
    a, *others = (open_channel(Ranks(DEVICES, n), store, hub=hub, timeout_s=60) for n in names)
    if wait in ("next", "ahead"):
        others[0].send((BIG if wait == "ahead" else BIG[:3],), "h/a", "k0")
        take(a, "h/b", "k0")
    if wait == "kept":
        pending = a.send((BIG,), "h/b", "k")
        ended = raised_in_a_thread(pending.wait)
    else:
        ended = raised_in_a_thread(lambda: take(a, "h/b", "k"))
    time.sleep(0.05)
    start = time.monotonic()
    a.abort("h/b has shown no sign of life for 1 s") if way == "abort" else a.close()
    error = ended()
    assert time.monotonic() - start < 0.5
    assert isinstance(error, PeerLostError)
    said = "h/b has shown no sign of life" if way == "abort" else "h/a has closed its channel"
    assert str(error).startswith(said)
    with pytest.raises(PeerLostError, match=said):
        a.send((), "h/b", "later")
    for end in (a, *others):
        end.close()


def test_only_the_first_reason_counts(ends: list[JobChannel]) -> None:
    a, _, _ = ends
    a.abort("the first")
    a.abort("the second")
    with pytest.raises(PeerLostError, match="the first"):
        a.send((), "h/b", "k")


def knock(address: str, said: bytes) -> socket.socket:
    host, _, port = address.partition(" ")
    stranger = socket.create_connection((host, int(port)))
    stranger.send(said)
    return stranger


def test_strangers_at_the_door_are_ignored(ends: list[JobChannel]) -> None:
    a, b, _ = ends
    place = b._place
    hello = b"evener-1" + place.token.encode() + a._place.token.encode()
    wrong = b"evener-1" + b"0" * 32 + a._place.token.encode()
    strangers = [knock(place.door, said) for said in (b"GET / HTTP/1.1\r\n", b"", hello[:50], wrong)]
    knock(place.door, b"gone").close()
    a.send((torch.ones(1),), "h/b", "k")
    assert take(b, "h/a", "k")[0] == 1
    strangers[-1].settimeout(2)
    assert strangers[-1].recv(1) == b"", "who has a wrong token is sent away"
    for stranger in strangers:
        stranger.close()


def test_a_crowd_at_the_door_does_not_keep_the_job_out(
    ends: list[JobChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doors, "_PATIENCE_S", 0.01)
    a, b, _ = ends
    crowd = [knock(b._place.door, b"ev") for _ in range(200)]
    a.send((torch.ones(1),), "h/b", "k")
    assert take(b, "h/a", "k")[0] == 1
    for stranger in crowd:
        stranger.close()


@pytest.mark.parametrize("packet", [b"\0\0\0\0", b"\xff\xff\xff\xff", b"\x20\0\0\0" + b"no header" * 9])
def test_bytes_that_are_no_message_are_an_error(ends: list[JobChannel], packet: bytes) -> None:
    a, b, _ = ends
    a.send((), "h/b", "k")
    take(b, "h/a", "k")
    a._senders["h/b"]._socket.send(packet)
    with pytest.raises(ReductionMismatchError, match="what h/a sent is no message"):
        take(b, "h/a", "k")


def test_an_address_that_others_cannot_reach_is_told(ends: list[JobChannel]) -> None:
    a, _, _ = ends
    a._place = replace(a._place, host="another")
    with pytest.raises(EnvironmentBrokenError, match="h/a has no address that other hosts can reach"):
        a.send((), "h/b", "k")


def test_nothing_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "IS_AVAILABLE", False)

    def descriptors() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    before, threads = descriptors(), threading.active_count()
    store = dist.HashStore()
    a, b = (open_channel(Ranks(DEVICES, here), store) for here in DEVICES[:2])
    for i in range(3):
        a.send((BIG,), "h/b", f"k{i}")
        b.send((torch.ones(5),), "h/a", f"k{i}")
    take(b, "h/a", "k0")
    assert descriptors() > before and threading.active_count() == threads + 2
    a.close()
    b.close()
    del a, b
    assert descriptors() == before and threading.active_count() == threads


MESSAGES = (
    (),
    (torch.tensor(3.5, dtype=torch.float64, requires_grad=True),),
    (torch.ones(2, 0), torch.tensor([True, False]), torch.randn(3, 5).bfloat16()),
    (torch.arange(100_000).reshape(-1, 10).T, torch.ones(1)),
)


@pytest.mark.parametrize("step", [1, 7, 4096, 10**9])
def test_a_stream_may_come_in_any_parts(step: int) -> None:
    sent = [(f"k{i}", m) for i, m in enumerate(MESSAGES)]
    if step > 1:
        sent *= 3
    else:
        sent = sent[:3]
    stream = b"".join(b"".join(framed(pack(key, 0.0, layout_of(m)), m)) for key, m in sent)
    source, target = socket.socketpair()
    source.setblocking(False)
    target.setblocking(False)
    frames, got, at = Frames("h/a"), [], 0
    while at < len(stream):
        at += source.send(stream[at : at + step])
        while (frame := frames.read(target)) is not None:
            got.append(frame)
    source.close()
    with pytest.raises(ConnectionResetError):
        frames.read(target)
    target.close()
    assert [f.header.key for f in got] == [key for key, _ in sent]
    for frame, (_, tensors) in zip(got, sent, strict=True):
        assert same(frame, tensors)


def same(frame: Frame, tensors: tuple[torch.Tensor, ...]) -> bool:
    found = frame.finished(CPU)
    return len(found) == len(tensors) and all(
        torch.equal(x, y) and x.dtype == y.dtype and x.requires_grad == y.requires_grad
        for x, y in zip(found, tensors, strict=True)
    )


@pytest.mark.parametrize("num", range(8))
def test_what_is_left_of_a_message(num: int) -> None:
    views = [memoryview(b"ab"), memoryview(b""), memoryview(b"cdefg")]
    assert bytes(beyond(views, num)) == b"abcdefg"[num:]


class Refusing:
    """A stream whose next message finds no memory."""

    def read(self, connection: socket.socket) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")


class Idle:
    """A porter that is told and carries nothing."""

    def carry(self, load: ahead.Ahead) -> None:
        return


def test_a_message_for_which_there_is_no_memory_is_told_at_once() -> None:
    """The thread that read it ended, for all peers, and who waited heard of a peer that sends nothing."""
    stop = Stop()
    here, there = socket.socketpair()
    with here, there:
        coming = ahead.Ahead("h/a", here, Refusing(), Idle())  # type: ignore[arg-type]
        assert not coming.move()
        with pytest.raises(RuntimeError, match="can't allocate"):
            coming.next("k of step 0", 60.0, stop)
    stop.close()
