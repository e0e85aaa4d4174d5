"""What holds of shared memory and of TCP alike, between ends that are here all in this process."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from evener.errors import PeerLostError
from evener.runtime.channels import channel
from evener.runtime.channels.channel import JobChannel, open_channel
from evener.runtime.ranks import Ranks

CPU = torch.device("cpu")
DEVICES = ("h/a", "h/b", "h/c")


@pytest.fixture(params=["shared memory", "TCP"])
def ends(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[JobChannel]]:
    if request.param == "TCP":
        monkeypatch.setattr(channel, "IS_AVAILABLE", False)
    store = dist.HashStore()
    opened = [open_channel(Ranks(DEVICES, here), store, timeout_s=0.3) for here in DEVICES]
    yield opened
    told = [reason for end in opened for reason in end.reasons.values()]
    assert told and all(request.param in reason for reason in told)
    for end in opened:
        end.close()


def take(end: JobChannel, source: str, key: str) -> tuple[torch.Tensor, ...]:
    return end.receive(source, key, device=CPU).wait()


def test_a_device_that_ends_is_known_at_once(ends: list[JobChannel]) -> None:
    a, b, c = ends
    a.send((torch.ones(1),), "h/b", "k0")
    a.close()
    awaited = [b.receive("h/a", f"k{i}", device=CPU) for i in range(2)]
    assert awaited[0].wait()[0] == 1, "what it had sent is still there"
    with pytest.raises(PeerLostError, match="h/a left while k1 was awaited from it"):
        awaited[1].wait()
    with pytest.raises(PeerLostError, match="h/a left while"):
        c.send((), "h/a", "k")
    with pytest.raises(PeerLostError, match="h/a left while"):
        take(c, "h/a", "k")


def test_a_device_that_ends_before_it_ever_connected_is_known_at_once(ends: list[JobChannel]) -> None:
    a, b, _ = ends
    b.send((), "h/a", "k")  # b knows a, a never took notice of b
    awaited = b.receive("h/a", "k", device=CPU)
    a.close()
    with pytest.raises(PeerLostError, match="h/a left while k was awaited"):
        awaited.wait()


def test_a_device_that_does_nothing_is_named_with_its_action(ends: list[JobChannel]) -> None:
    _, b, _ = ends
    with pytest.raises(PeerLostError, match=r"h/a did not send 1SEND_F2 of step 3 within 0.3 s"):
        take(b, "h/a", "1SEND_F2 of step 3")
