"""Gradients on their way to the host: those of a piece together, while the one before lands.

backward   │ layer 3 ▓▓▓▓│ layer 2 ▓▓▓▓│ layer 1 ▓▓▓▓│
out                      │▒▒▒ layer 3  │▒▒▒ layer 2  │▒▒▒ layer 1
host                                 └─ added ─┘ while the device goes on
"""

from collections.abc import Callable, Sequence

import torch

from evener.runtime.residing.flow import Copied, Flow
from evener.runtime.residing.pieces import Piece

Accept = Callable[[torch.Tensor, torch.Tensor], None]
OnHost = Callable[[Callable[[], None]], None]
Made = list[tuple[torch.Tensor, torch.Size]]


class Returning:
    """Takes gradients of guests and hands them to `accept(guest, gradient)` on the host, in `on_host`.

    On the device are at most the gradients of two pieces: of one that are being made, of one that leave.
    """

    def __init__(self, pieces: Sequence[Piece], flow: Flow) -> None:
        self._flow = flow
        self._piece_of = {id(g): piece for piece in pieces for g in piece.guests}
        self._made: dict[int, torch.Tensor] = {}
        self._making: Piece | None = None
        self._leaving: tuple[Made, torch.Tensor, Copied] | None = None
        self.accept: Accept = lambda guest, gradient: None
        self.on_host: OnHost = lambda work: work()

    def knows(self, guest: torch.Tensor) -> bool:
        """Whether `guest` is one of its pieces'."""
        return id(guest) in self._piece_of

    def take(self, guest: torch.Tensor, gradient: torch.Tensor) -> None:
        """A gradient that a backward has made."""
        piece = self._piece_of[id(guest)]
        if self._making is not piece:
            self._leave()
            self._making = piece
        before = self._made.get(id(guest))
        self._made[id(guest)] = gradient if before is None else before + gradient
        del gradient
        if len(self._made) == len(piece.guests):
            self._leave()

    def flush(self) -> None:
        """Everything that was made has landed and was accepted."""
        self._leave()
        self._land()

    def forget(self) -> None:
        """Nothing of an attempt that failed counts."""
        self._made, self._making, self._leaving = {}, None, None

    def _leave(self) -> None:
        piece, made = self._making, self._made
        self._making, self._made = None, {}
        if piece is None:
            return
        self._land()
        guests: Made = [(g, made[id(g)].shape) for g in piece.guests if id(g) in made]
        gradients = [made.pop(id(g)).reshape(-1) for g, _ in guests]
        flat = gradients[0] if len(gradients) == 1 else torch.cat(gradients)
        del gradients
        self._leaving = guests, flat, self._flow.send(flat)

    def _land(self) -> None:
        leaving, self._leaving = self._leaving, None
        if leaving is None:
            return
        guests, _, copied = leaving
        home = self._flow.landed(copied)

        def add() -> None:
            place = 0
            for guest, shape in guests:  # the guest itself may have left the device
                self.accept(guest, home[place : place + shape.numel()].view(shape))
                place += shape.numel()

        self.on_host(add)
