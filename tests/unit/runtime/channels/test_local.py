"""Devices of one process."""

import threading

import pytest
import torch

from evener.errors import PeerLostError, ReductionMismatchError, UnknownNameError
from evener.runtime.channels.channel import JobChannel, open_channel
from evener.runtime.channels.local import Hub
from evener.runtime.ranks import Ranks

CPU = torch.device("cpu")
DEVICES = ("h/a", "h/b")


def pair(timeout_s: float = 5.0) -> list[JobChannel]:
    hub = Hub()
    return [open_channel(Ranks(DEVICES, here), hub=hub, timeout_s=timeout_s) for here in DEVICES]


def test_tensors_are_handed_over_and_become_leaves() -> None:
    a, b = pair()
    x = torch.ones(2, requires_grad=True) * 3
    a.send((x, torch.zeros(0, 4)), "h/b", "k").wait()
    got, empty = b.receive("h/a", "k", device=CPU).wait()
    assert got.is_leaf and got.requires_grad and got.tolist() == [3.0, 3.0] and empty.shape == (0, 4)
    assert got.data_ptr() == x.data_ptr(), "on one device nothing is copied"
    assert not empty.requires_grad
    assert "one process" in a.reasons["h/b"]


def test_in_order_even_when_waited_for_backwards() -> None:
    a, b = pair()
    for i in range(5):
        a.send((torch.tensor(i),), "h/b", f"k{i}")
    awaited = [b.receive("h/a", f"k{i}", device=CPU) for i in range(5)]
    assert [int(w.wait()[0]) for w in reversed(awaited)] == [4, 3, 2, 1, 0]
    assert all(w.sent_s is not None for w in awaited)


def test_another_step_names_both_sides_and_nothing_after_it_is_believed() -> None:
    a, b = pair()
    a.send((), "h/b", "1SEND_F2 of step 3")
    a.send((), "h/b", "k")
    wrong, after = (b.receive("h/a", key, device=CPU) for key in ("1SEND_F2 of step 2", "k"))
    for awaited in (wrong, after):
        with pytest.raises(
            ReductionMismatchError,
            match="h/b waits for 1SEND_F2 of step 2 from h/a, which sent 1SEND_F2 of step 3",
        ):
            awaited.wait()


def test_a_device_that_closes_is_named_after_what_it_sent() -> None:
    a, b = pair()
    a.send((torch.ones(1),), "h/b", "k0")
    first, second = (b.receive("h/a", f"k{i}", device=CPU) for i in range(2))
    waiting = threading.Timer(0.05, a.close)
    waiting.start()
    assert first.wait()[0] == 1
    with pytest.raises(PeerLostError, match="h/a left while k1 was awaited"):
        second.wait()
    with pytest.raises(PeerLostError, match="h/a left while k2 was sent"):
        b.send((), "h/a", "k2")
    waiting.join()


def test_a_device_that_does_nothing_is_named_with_its_action() -> None:
    _, b = pair(timeout_s=0.01)
    with pytest.raises(PeerLostError, match=r"h/a did not send 1SEND_F2 of step 3 within 0.01 s"):
        b.receive("h/a", "1SEND_F2 of step 3", device=CPU).wait()


@pytest.mark.parametrize("name", ["h/z", "h/a"])
def test_a_device_that_is_not_of_the_job(name: str) -> None:
    a, _ = pair()
    with pytest.raises(UnknownNameError, match=f"no channel to {name}"):
        a.send((), name, "k")
    with pytest.raises(UnknownNameError, match=f"no channel to {name}"):
        a.receive(name, "k", device=CPU)


def test_a_closed_channel_says_so() -> None:
    a, _ = pair()
    a.close()
    with pytest.raises(PeerLostError, match="h/a has closed its channel"):
        a.send((), "h/b", "k")


def test_messages_of_one_step_may_be_asked_for_in_another_order() -> None:
    """A device with two stages may send 1SEND_F2 before 1SEND_B1, which its neighbour needs first."""
    a, b = pair()
    a.send((torch.ones(1),), "h/b", "1SEND_F2 of step 0")
    a.send((torch.zeros(1),), "h/b", "1SEND_B1 of step 0")
    assert b.receive("h/a", "1SEND_B1 of step 0", device=CPU).wait()[0] == 0
    assert b.receive("h/a", "1SEND_F2 of step 0", device=CPU).wait()[0] == 1
