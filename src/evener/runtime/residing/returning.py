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


class _Bunch:
    """The gradients of one piece, in one flat tensor."""

    def __init__(self, piece: Piece) -> None:
        self.piece = piece
        self.flat = piece.gradients()
        self._views = piece.views_of(self.flat)
        self.has = [False] * len(self._views)
        self.leaving: Copied | None = None

    def put(self, i: int, gradient: torch.Tensor) -> None:
        """Gradient number `i` comes, or more of it."""
        if self.has[i]:
            self._views[i].add_(gradient)
        else:
            self._views[i].copy_(gradient)
            self.has[i] = True

    def landed(self, home: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(guest, gradient on the host) of those that came."""
        views = zip(self.piece.guests, self.piece.views_of(home), self.has, strict=True)
        return [(guest, view) for guest, view, has in views if has]


class Returning:
    """Takes gradients of guests and hands them to `accept(guest, gradient)` on the host, in `on_host`.

    On the device are at most the gradients of two pieces: of one that are being made, of one that leave.
    """

    def __init__(self, pieces: Sequence[Piece], flow: Flow) -> None:
        self._flow = flow
        self._place = {id(g): (piece, i) for piece in pieces for i, g in enumerate(piece.guests)}
        self._making: _Bunch | None = None
        self._leaving: _Bunch | None = None
        self.accept: Accept = lambda guest, gradient: None
        self.on_host: OnHost = lambda work: work()

    def knows(self, guest: torch.Tensor) -> bool:
        """Whether `guest` is one of its pieces'."""
        return id(guest) in self._place

    def take(self, guest: torch.Tensor, gradient: torch.Tensor) -> None:
        """A gradient that a backward has made."""
        piece, i = self._place[id(guest)]
        if self._making is None or self._making.piece is not piece:
            self._leave()
            self._making = _Bunch(piece)
        self._making.put(i, gradient)
        if all(self._making.has):
            self._leave()

    def flush(self) -> None:
        """Everything that was made has landed and was accepted."""
        self._leave()
        if self._leaving is not None and self._leaving.leaving is not None:
            self._flow.await_(self._leaving.leaving)  # nothing hides this one: the backward has ended
        self._land()

    def forget(self) -> None:
        """Nothing of an attempt that failed counts."""
        self._making = self._leaving = None

    def _leave(self) -> None:
        if self._making is None:
            return
        self._land()
        self._leaving, self._making = self._making, None
        self._leaving.leaving = self._flow.send(self._leaving.flat)

    def _land(self) -> None:
        bunch, self._leaving = self._leaving, None
        if bunch is None:
            return
        assert bunch.leaving is not None
        found = bunch.landed(self._flow.landed(bunch.leaving))

        def add() -> None:
            for guest, gradient in found:
                self.accept(guest, gradient)

        self.on_host(add)
