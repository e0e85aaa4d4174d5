"""Channels between processes, over both transports: what arrives, what does not, and how that is told."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from evener.errors import PeerLostError, ReductionMismatchError
from evener.runtime.channels import channel
from evener.runtime.channels.channel import JobChannel, open_channel
from evener.runtime.channels.local import Hub
from evener.runtime.ranks import Ranks
from tests.local.pool import Pool

CPU = torch.device("cpu")
DEVICES = ("lab1/a", "lab1/b", "lab2/c")
both = pytest.mark.parametrize("transport", ["shared", "tcp"])


def open_here(
    rank: int, world_size: int, transport: str, timeout_s: float = 10.0, generation: int = 0
) -> JobChannel:
    """This process's channel; "tcp" is what two hosts would get."""
    channel.IS_AVAILABLE = transport == "shared"
    store = dist.PrefixStore(f"channel{generation}", dist.distributed_c10d._get_default_store())
    return open_channel(Ranks(DEVICES[:world_size], DEVICES[rank]), store, timeout_s=timeout_s)


def failing(work: Callable[[], Any], kind: type[Exception]) -> tuple[str, float]:
    """What the error says in its first line, and the seconds until it came."""
    start = time.monotonic()
    with pytest.raises(kind) as error:
        work()
    return str(error.value).splitlines()[0], time.monotonic() - start


def messages() -> list[tuple[torch.Tensor, ...]]:
    """Everything that may cross a cut, small and large and small again."""
    g = torch.Generator().manual_seed(3)
    sent: list[tuple[torch.Tensor, ...]] = [
        (torch.randn(4, 7, generator=g, requires_grad=True), torch.arange(5), torch.tensor([True, False])),
        (),
        (torch.randn(3, 3, generator=g).bfloat16(), torch.randn(2, generator=g).half()),
        (torch.empty(0, 16, requires_grad=True),),
    ]
    for size in (100_000, 90, 400_000, 400_001, 30_000, 1_500_000, 10):  # grows over rings and buffers
        sent.append((torch.randn(size, generator=g), torch.tensor(size)))
    return sent


def exchange(rank: int, world_size: int, transport: str) -> str:
    """Both ends send everything before either takes anything; twice, so that all buffers are used again."""
    opened = open_here(rank, world_size, transport)
    peer = DEVICES[1 - rank]
    for round_ in range(2):
        pending = [opened.send(m, peer, f"{i} of {round_}") for i, m in enumerate(messages())]
        awaited = [opened.receive(peer, f"{i} of {round_}", device=CPU) for i, _ in enumerate(messages())]
        for sent, w in zip(messages(), awaited, strict=True):
            got = w.wait()
            assert [(x.dtype, x.shape, x.requires_grad) for x in got] == [
                (x.dtype, x.shape, x.requires_grad) for x in sent
            ]
            assert all(torch.equal(x, y) for x, y in zip(sent, got, strict=True))
            assert (w.sent_s is None) == (transport == "tcp")
        for p in pending:
            p.wait()
    dist.barrier()
    opened.close()
    return opened.reasons[peer]


@both
def test_everything_arrives_both_ways(pool: Pool, transport: str) -> None:
    reasons = pool.run(exchange, 2, transport)
    assert all(("TCP" if transport == "tcp" else "shared memory") in reason for reason in reasons)


def reopen(rank: int, world_size: int, transport: str) -> None:
    """Receives that were posted and never served must not take messages of the next channel."""
    for generation in range(3):
        opened = open_here(rank, world_size, transport, generation=generation)
        peer = DEVICES[1 - rank]
        sent = opened.send((torch.tensor(generation),), peer, "k")
        assert int(opened.receive(peer, "k", device=CPU).wait()[0]) == generation
        sent.wait()
        dist.barrier()
        opened.close()


@both
def test_a_channel_can_be_opened_anew(pool: Pool, transport: str) -> None:
    pool.run(reopen, 2, transport)


def send_again_and_again(opened: Any, to: str) -> None:
    """The sockets of a process that ends close one after another: the one that is read may be the first."""
    for _ in range(100):
        opened.send((), to, "k")
        time.sleep(0.01)


def die(rank: int, world_size: int, transport: str, with_child: bool) -> Any:
    """The last device kills itself; the others wait for it, and one sends to it."""
    opened = open_here(rank, world_size, transport)
    last = DEVICES[world_size - 1]
    if rank == world_size - 1:
        for peer in DEVICES[:rank]:
            opened.send((torch.ones(300_000),), peer, "k0")
            opened.receive(peer, "hello", device=CPU).wait()
        if with_child and os.fork() == 0:
            time.sleep(3)  # a loader's worker that outlives its parent for a while
            os._exit(0)
        time.sleep(0.1)
        os.kill(os.getpid(), 9)
    opened.send((), last, "hello").wait()
    awaited = [opened.receive(last, key, device=CPU) for key in ("k0", "1SEND_F2 of step 3")]
    assert awaited[0].wait()[0].sum() == 300_000
    found = failing(awaited[1].wait, PeerLostError)
    if transport == "shared":
        failing(lambda: send_again_and_again(opened, last), PeerLostError)
    opened.close()
    return *found, "memfd:evener" in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize(("transport", "with_child"), [("shared", True), ("tcp", True)])
def test_a_killed_device_is_named_at_once(pool: Pool, transport: str, with_child: bool) -> None:
    *others, killed = pool.outcomes(die, 3, transport, with_child)
    assert "died with exit code -9" in killed.error
    for outcome in others:
        assert outcome.ok, outcome.error
        said, seconds, is_mapped = outcome.value
        assert said == "lab2/c left while 1SEND_F2 of step 3 was awaited from it"
        assert seconds < 1.0
        assert not is_mapped, "shared memory is given back"


def stall(rank: int, world_size: int, transport: str) -> tuple[str, float] | None:
    """One device sends the first message and then nothing more."""
    opened = open_here(rank, world_size, transport, timeout_s=0.5)
    result = None
    if rank == 0:
        opened.send((torch.ones(2),), DEVICES[1], "1SEND_F1 of step 3")
        time.sleep(1.5)
    else:
        opened.receive(DEVICES[0], "1SEND_F1 of step 3", device=CPU).wait()
        result = failing(opened.receive(DEVICES[0], "1SEND_F2 of step 3", device=CPU).wait, PeerLostError)
    opened.close()
    return result


@both
def test_a_stalled_device_is_named_with_its_action(pool: Pool, transport: str) -> None:
    _, (said, seconds) = pool.run(stall, 2, transport)
    assert said == "lab1/a did not send 1SEND_F2 of step 3 within 0.5 s"
    assert 0.4 < seconds < 1.4


def disagree(rank: int, world_size: int, transport: str) -> str | None:
    opened = open_here(rank, world_size, transport)
    said = None
    if rank == 0:
        opened.send((torch.ones(2),), DEVICES[1], "1SEND_F2 of step 4").wait()
    else:
        awaited = opened.receive(DEVICES[0], "1SEND_F2 of step 3", device=CPU)
        said, _ = failing(awaited.wait, ReductionMismatchError)
    dist.barrier()
    opened.close()
    return said


@both
def test_two_devices_in_different_steps_are_found_out(pool: Pool, transport: str) -> None:
    said = pool.run(disagree, 2, transport)[1]
    assert said == "lab1/b waits for 1SEND_F2 of step 3 from lab1/a, which sent 1SEND_F2 of step 4"


def pass_on(rank: int, world_size: int, transport: str) -> list[str]:
    """lab1/a and lab1/b in one process, lab2/c in the other: a number goes round and grows by one a hop."""
    channel.IS_AVAILABLE = transport == "shared"
    store = dist.distributed_c10d._get_default_store()
    hub = Hub()
    here = DEVICES[:2] if rank == 0 else DEVICES[2:]
    ends = {name: open_channel(Ranks(DEVICES, name), store, hub=hub, timeout_s=10) for name in here}
    pending = [ends[DEVICES[0]].send((torch.tensor(0),), DEVICES[1], "0")] if rank == 0 else []
    for hop in range(1, 13):
        name, source, to = (DEVICES[(hop + step) % 3] for step in (0, -1, 1))
        if name in ends:
            (got,) = ends[name].receive(source, str(hop - 1), device=CPU).wait()
            assert int(got) == hop - 1
            pending.append(ends[name].send((got + 1,), to, str(hop)))
    if rank == 0:
        ends[DEVICES[1]].receive(DEVICES[0], "12", device=CPU).wait()
    for p in pending:
        p.wait()
    reasons = [reason for end in ends.values() for reason in end.reasons.values()]
    dist.barrier()
    for end in ends.values():
        end.close()
    return reasons


@both
def test_two_devices_in_one_process_and_one_in_another(pool: Pool, transport: str) -> None:
    first, second = pool.run(pass_on, 2, transport)
    assert sum("in one process" in reason for reason in first) == 2
    word = "TCP" if transport == "tcp" else "shared memory"
    assert sum(word in reason for reason in first) == sum(word in reason for reason in second) == 2
