"""Parcels over links that a fleet file describes: when they are there, on the device's clock."""

from typing import Any

import pytest
import torch

from evener.core.figures import Curve
from evener.core.fleet import Device, Fleet, Link
from evener.rehearsal.post import PacedPost
from tests.fakes import PostOffice

FLEET = Fleet(
    devices=tuple(Device(name=f"lab/{n}", kind=n) for n in "abc"),
    links=(Link(a="lab", b="lab", curve=Curve(points=((0.0, 0.001), (1e6, 0.002)), source="assumed")),),
)


class Clock:
    """A device whose clock stands still until it waits."""

    def __init__(self, now_s: float) -> None:
        self.now_s = now_s

    def launch(self) -> float:
        return self.now_s

    def advance(self, until_s: float) -> None:
        self.now_s = max(self.now_s, until_s)


def pair(sender_s: float, receiver_s: float) -> tuple[PacedPost, PacedPost, Any]:
    office = PostOffice()
    clock: Any = Clock(receiver_s)
    sender: Any = Clock(sender_s)
    return (
        PacedPost(office.post("lab/a"), sender, FLEET),
        PacedPost(office.post("lab/b"), clock, FLEET),
        clock,
    )


@pytest.mark.parametrize(("sender_s", "receiver_s", "starts_s"), [(5.0, 3.0, 5.0), (5.0, 7.0, 7.0)])
def test_a_buffer_is_there_a_handover_after_it_was_handed_in_and_asked_for(
    sender_s: float, receiver_s: float, starts_s: float
):
    a, b, clock = pair(sender_s, receiver_s)
    a.now()
    a.send(torch.arange(3.0), "lab/b", 7)
    asked_s = b.now()
    room = torch.zeros(3)
    arriving = b.receive(room, "lab/a", 7)
    arriving.wait()
    assert torch.equal(room, torch.arange(3.0))
    assert arriving.sent_s == sender_s and asked_s == receiver_s
    # a owns all of 1 MB and sends it to b alone here: 1 ms + 1 ms.
    b.reach([asked_s, arriving.sent_s], {"lab/a": 1_000_000, "lab/b": 0}, adds=False)
    assert clock.now_s == pytest.approx(starts_s + 0.002)


def test_buffers_follow_one_another_and_gradients_go_beside_parameters():
    _, b, clock = pair(0.0, 0.0)
    for _ in range(2):
        b.reach([0.0], {"lab/a": 1_000_000, "lab/b": 0}, adds=False)
    assert clock.now_s == pytest.approx(0.004)
    b.reach([0.0], {"lab/a": 1_000_000, "lab/b": 0}, adds=True)
    assert clock.now_s == pytest.approx(0.004)


def test_nothing_under_way_takes_no_time():
    _, b, clock = pair(0.0, 2.0)
    b.reach([], {}, adds=False)
    assert clock.now_s == 2.0
