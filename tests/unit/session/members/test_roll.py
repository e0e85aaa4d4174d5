"""The roll call between two generations."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from evener.core.membership import Standing
from evener.errors import PeerLostError
from evener.session.members.roll import call_roll
from evener.session.pulse import begun_key


class Room:
    """A generation's room over a store in memory."""

    def __init__(self) -> None:
        self.store = dist.HashStore()
        self.put_in: dict[str, Any] = {}

    def put(self, key: str, value: Any) -> None:
        self.put_in[key] = value

    def has(self, key: str) -> bool:
        return key in self.put_in

    def is_told(self, key: str) -> bool:
        return self.store.check([key])

    def first_failure(self) -> None:
        return None


def test_a_roll_that_somebody_has_given_up_is_left() -> None:
    """One of 200 jobs stood still: its devices waited for each other, it seems in two rolls."""
    room = Room()
    room.store.set(begun_key(5), "lab/1")
    pulse: Any = SimpleNamespace(lost={}, is_cut_off=False)
    standing = Standing(device="lab/0", step=3, samples_seen=24)
    with pytest.raises(PeerLostError, match="calls the roll of generation 5"):
        call_roll(room, pulse, ("lab/0", "lab/1"), standing, 4)  # type: ignore[arg-type]
