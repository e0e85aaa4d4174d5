"""What goes over the cuts of a step: pieces of activations and gradients, between stages and devices.

stage 0 ──pass_on──┬──────────── stays on this device ────────────┬──► box of stage 1 ──collected──► stage 1
                   └──► to be sent ──send──► channel ──receive ──┘      gradients come back the same way
"""

from collections.abc import Callable, Sequence

import torch

from evener.core.routes import Piece
from evener.core.seams import Channel, Pending, Receiving
from evener.runtime.holding import Routed
from evener.runtime.parts import Carry, Slot, as_leaves, cut_samples

Key = tuple[int, int]  # (stage, micro-batch)


class Mail:
    """The mail of one step on the device `here`, in both directions: "F" and "B"."""

    def __init__(self, routed: Routed, here: str, channel: Channel | None, number: int) -> None:
        self._routed, self._here, self._channel, self._number = routed, here, channel, number
        self._boxes: dict[tuple[str, Key], list[tuple[int, Carry]]] = {}
        self._sends: list[Pending] = []

    def pass_on(self, key: Key, carry: Carry, slots: Sequence[Slot]) -> None:
        """Cut activations into the pieces that the next stage's devices need."""
        mine = self._routed.given("F", key)
        if mine:
            cuts = cut_samples(carry, slots, tuple(p.samples for p in mine))
            self._hand_on("F", key, mine, cuts)

    def give_back(self, key: Key, gradients: list[Carry]) -> None:
        """Every piece of activations that came gets its gradients back; none where nothing counts."""
        mine = self._routed.given("B", key)
        self._hand_on("B", key, mine, gradients or [()] * len(mine))

    def send(self, direction: str, key: Key) -> None:
        """What the micro-batch `key` has for other devices leaves."""
        away = [p for p in self._routed.given(direction, key) if p.target != self._here]
        cuts = self._boxes.pop(("out " + direction, key))
        assert self._channel is not None
        for piece, (_, cut) in zip(away, cuts, strict=True):
            self._sends.append(self._channel.send(cut, piece.target, self._name(direction, key)))

    def receive(
        self, direction: str, key: Key, device: torch.device, arrived: Callable[[Receiving], Carry]
    ) -> float | None:
        """Wait for what others have for the micro-batch `key`; when the last of it was sent, if known.

        `arrived` gives what a message brings.
        """
        source = (key[0] + (-1 if direction == "F" else 1), key[1])
        coming = self._routed.taken(direction, source)
        assert self._channel is not None
        expected = [
            (i, self._channel.receive(p.source, self._name(direction, source), device=device))
            for i, p in enumerate(coming)
            if p.source != self._here
        ]
        box = self._boxes.setdefault((direction, key), [])
        box += [(i, arrived(receiving)) for i, receiving in expected]
        return max((r.sent_s for _, r in expected if r.sent_s is not None), default=None)

    def collected(self, direction: str, key: Key) -> list[Carry]:
        """Everything that came for this micro-batch, in order of samples."""
        box = self._boxes.pop((direction, key))
        if len(box) > 1:
            box.sort(key=lambda entry: entry[0])
        return [carry for _, carry in box]

    def let_go(self) -> None:
        """Wait until what was sent has left, so that its memory can be used again."""
        for pending in self._sends:
            pending.wait()
        self._sends = []

    def _hand_on(self, direction: str, key: Key, mine: Sequence[Piece], cuts: list[Carry]) -> None:
        """What stays on this device goes straight to its stage, the rest waits to be sent."""
        target = (key[0] + (1 if direction == "F" else -1), key[1])
        for order, (piece, cut) in enumerate(zip(mine, cuts, strict=True)):
            if piece.target == self._here:
                box = self._boxes.setdefault((direction, target), [])
                box.append((self._order(direction, key, piece), cut if direction == "B" else as_leaves(cut)))
            else:
                self._boxes.setdefault(("out " + direction, key), []).append((order, cut))

    def _order(self, direction: str, source: Key, piece: Piece) -> int:
        """The place of `piece` among all that its target gets of this micro-batch."""
        pieces = self._routed.all(direction, source)
        return 0 if len(pieces) == 1 else [p for p in pieces if p.target == piece.target].index(piece)

    def _name(self, direction: str, source: Key) -> str:
        return f"{source[0]}SEND_{direction}{source[1]} of step {self._number}"
