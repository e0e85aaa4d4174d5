"""Copies of state in the memory of other devices, for layers that only one device holds.

    before every n-th step    each device keeps a copy of what it holds, and of what only its neighbour holds
                              a: own + c's    b: own + a's    c: own + b's

When b is lost, all go back to those copies: they are of one and the same step. A copy replaces the one before
it only when it is complete on all devices, which the next step's end proves.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from evener.core.membership import Snapshot
from evener.core.seams import Channel
from evener.session.meeting import Meeting
from evener.session.members.handover import Move, State, hand_over

KEPT = 2  # the newest may be incomplete somewhere


@dataclass
class Copies:
    """What this device keeps, by step: (the position, state by name)."""

    kept: dict[int, tuple[Snapshot, dict[str, State]]] = field(default_factory=dict)

    @property
    def snapshots(self) -> tuple[Snapshot, ...]:
        """What there is, as told to others."""
        return tuple(
            replace(position, names=tuple(states)) for _, (position, states) in sorted(self.kept.items())
        )

    def keep(self, position: Snapshot, states: Mapping[str, State]) -> None:
        """Keep copies of `states` as of `position`; older ones than the last few go."""
        copied = {name: {n: t.detach().cpu().clone() for n, t in s.items()} for name, s in states.items()}
        self.kept[position.step] = (position, copied)
        for old in sorted(self.kept)[:-KEPT]:
            del self.kept[old]

    def add(self, step: int, states: Mapping[str, State]) -> None:
        """Add what another device gave of the same step."""
        self.kept[step][1].update(states)

    def state_of(self, step: int, name: str) -> State:
        """The copy of one name."""
        return self.kept[step][1][name]

    def forget_after(self, step: int) -> None:
        """What was kept of later steps than `step` was given up."""
        self.kept = {s: kept for s, kept in self.kept.items() if s <= step}


def copy_moves(holders: Mapping[str, Sequence[str]], hosts: Mapping[str, str]) -> tuple[Move, ...]:
    """(name, from, to) for every name that only one device holds; to the next device, of another host if any.

    `hosts` has the host of each device, in the order of the job. Example: holders {"w": ("a",)} on devices a
    and b: (("w", "a", "b"),).
    """
    devices = list(hosts)
    found = []
    for name in sorted(holders):
        if len(holders[name]) == 1 and len(devices) > 1:
            (owner,) = holders[name]
            at = devices.index(owner)
            others = devices[at + 1 :] + devices[:at]
            away = [d for d in others if hosts[d] != hosts[owner]]
            found.append((name, owner, (away or others)[0]))
    return tuple(found)


def exchange(
    copies: Copies,
    moves: Sequence[Move],
    here: str,
    held: Sequence[str],
    state_of: Callable[[str], State],
    channel: Channel,
    room: Meeting,
    position: Snapshot,
) -> None:
    """Keep own state and the neighbour's as of `position`; called by all together."""
    step = position.step
    copies.keep(position, {name: state_of(name) for name in held})
    came = hand_over(moves, here, state_of, channel, room.within(f"copies/{step}"), f"step {step}")
    copies.add(step, came)
