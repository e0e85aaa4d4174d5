"""Copies between accelerators, with cards that are honest, distant, or lie."""

import pytest
import torch

from evener.core.fleet import Device
from evener.probing.peers import Cards, copies_between, peer_copies


class FakeCards(Cards):
    """Cards in host memory. `direct` pairs reach each other; copies over `lying` pairs change a byte."""

    def __init__(self, direct=(), lying=()):
        self.direct, self.lying = set(direct), set(lying)

    def reaches(self, source, target):
        return (source, target) in self.direct

    def pattern(self, card):
        self.at = card
        return torch.randint(0, 256, (1000,), dtype=torch.uint8)

    def copy(self, there, target):
        arrived = there.clone()
        if (self.at, target) in self.lying:
            arrived[7] ^= 1
        return arrived


DEVICES = [("a/0", 0), ("a/1", 1), ("a/2", 2)]


def states(cards):
    return {(c.a, c.b): c.state for c in copies_between(DEVICES, cards)}


def test_the_worse_of_both_ways_counts():
    cards = FakeCards(direct=[(0, 1), (1, 0), (0, 2)], lying=[(2, 1)])
    assert states(cards) == {("a/0", "a/1"): "direct", ("a/0", "a/2"): "staged", ("a/1", "a/2"): "lies"}


def test_a_lie_is_one_even_where_the_driver_says_direct():
    both = [(0, 1), (1, 0)]
    assert states(FakeCards(direct=both, lying=both))["a/0", "a/1"] == "lies"


def test_nothing_is_tried_for_fewer_than_two():
    assert peer_copies([Device(name="a/cpu", kind="c")]) == ((), "")
    assert peer_copies([Device(name="a/0", kind="g", type="cuda", index=0)]) == ((), "")


@pytest.mark.skipif(torch.cuda.is_available(), reason="these cards must not exist")
def test_what_cannot_be_tried_is_said():
    cards = [Device(name=f"a/{i}", kind="g", type="cuda", index=i) for i in range(2)]
    found, why = peer_copies(cards, answer_s=60)
    assert found == () and "could not be tried" in why
    found, why = peer_copies(cards, answer_s=0.01)
    assert found == () and "could not be tried: did not answer within 0.01 s" in why
