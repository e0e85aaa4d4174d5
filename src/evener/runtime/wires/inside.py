"""The part of a sum that stays inside a group: each lane's values come together on one member, and go back.

Two ways behind one interface: memory that all members share (shared.py), or messages. Values lie in host
memory, where those of accelerators come first: the lanes need them there.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from evener.core.exchange import Span
from evener.runtime.wires.messages import Messages, Outgoing


class Inside(Protocol):
    """Both take one piece of a buffer; `spans` are the lanes' values in it, `owners` who has each lane."""

    def collect(self, piece: Tensor, number: int, spans: Sequence[Span]) -> None:
        """Have the group's sum of each span on its owner, in place."""
        ...

    def spread(self, piece: Tensor, number: int, spans: Sequence[Span]) -> None:
        """Have each span as its owner has it on all members, in place."""
        ...

    def give_up(self) -> None:
        """The sum has failed: wait for nothing that would come of pieces under way."""
        ...


class Alone:
    """The inside of a group of one."""

    def collect(self, piece: Tensor, number: int, spans: Sequence[Span]) -> None:
        return

    def spread(self, piece: Tensor, number: int, spans: Sequence[Span]) -> None:
        return

    def give_up(self) -> None:
        return


class MessagesInside:
    """Every member sends each owner its values; the owner adds them in the order of members."""

    def __init__(
        self, there: Messages, back: Messages, members: Sequence[str], owners: Sequence[str]
    ) -> None:
        self._there, self._back = there, back
        self._members, self._owners, self._here = tuple(members), tuple(owners), there.here
        self._others = tuple(m for m in members if m != there.here)

    def collect(self, piece: Tensor, number: int, spans: Sequence[Span]) -> None:
        # All is sent before anything is waited for: two owners would wait for each other.
        lanes = [(i, piece[a:b], o) for i, ((a, b), o) in enumerate(zip(spans, self._owners, strict=True))]
        lanes = [(i, values, owner) for i, values, owner in lanes if len(values)]
        sent = [_send(self._there, o, v, number, i) for i, v, o in lanes if o != self._here]
        for _, values, owner in lanes:
            if owner == self._here:
                self._add(values, number)
        _wait(sent)

    def _add(self, values: Tensor, number: int) -> None:
        expected = {m: self._there.expect(m) for m in self._others}
        own = values if self._members[0] == self._here else values.clone()
        for i, member in enumerate(self._members):
            if member == self._here:
                if i:
                    values.add_(own)
                continue
            payload = self._there.receive(member, expected.pop(member), values.nbytes, values, number)
            theirs = payload.view(values.dtype)
            if i:
                values.add_(theirs)
            else:
                values.copy_(theirs)

    def spread(self, piece: Tensor, number: int, spans: Sequence[Span]) -> None:
        sent = []
        for i, ((a, b), owner) in enumerate(zip(spans, self._owners, strict=True)):
            if owner == self._here and b > a:
                sent += [_send(self._back, m, piece[a:b], number, i) for m in self._others]
        for (a, b), owner in zip(spans, self._owners, strict=True):
            values = piece[a:b]
            if owner != self._here and len(values):
                work = self._back.expect(owner)
                payload = self._back.receive(owner, work, values.nbytes, values, number)
                values.copy_(payload.view(values.dtype))
        _wait(sent)

    def give_up(self) -> None:
        return  # its waits are Gloo's, which end with their sockets


def _send(messages: Messages, to: str, values: Tensor, number: int, slot: int) -> Outgoing:
    messages.outgoing(to, values.nbytes, slot).view(values.dtype).copy_(values)
    return messages.send(to, values.nbytes, values, number, slot)


def _wait(sent: list[Outgoing]) -> None:
    while sent:
        sent.pop().wait()
