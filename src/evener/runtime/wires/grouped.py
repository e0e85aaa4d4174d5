"""Sums over groups, asynchronously: pieces of a buffer go through four stages, each a thread of its own.

    track 0    collect inside ──► scatter between ──► gather between ──► spread inside
               piece 6            piece 4             piece 2            piece 0
    track 1    piece 7            piece 5             piece 3            piece 1

Every device puts the same pieces in the same order on the same tracks, and a stage does them in that order:
no two messages of a pair can be taken for one another. With a second track a link has something to carry
while the first one waits for its slowest peer.
"""

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import finalize

import torch
from torch import Tensor

from evener.core.exchange import Exchange, Span
from evener.core.seams import Pending
from evener.errors import EvenerError, PeerLostError
from evener.runtime.wires.inside import Inside
from evener.runtime.wires.lane import LaneEnd
from evener.runtime.wires.lines import Line

Track = tuple[Inside, dict[int, LaneEnd]]
LOOK_S = 0.05
STAGES = ("collect", "scatter", "gather", "spread")
BETWEEN = ("scatter", "gather")


@dataclass
class _Piece:
    """Values on their way; `name` is what they are called in every step."""

    values: Tensor
    number: int
    name: tuple
    track: int
    exact: bool
    spans: tuple[Span, ...]
    done: threading.Event = field(default_factory=threading.Event)


class GroupedWire:
    """A `Wire` that carries out `exchange`: all bits of the sum are the same on every device.

    A track is this device's group and its lanes by number. Without `collects` the buffers already are their
    group's sum, the same on all of its members. `note` is what is to be told of how it was opened. The first
    error ends every reduction under way and all later ones; nothing that belongs to a group is kept alive
    then.
    """

    def __init__(
        self, exchange: Exchange, tracks: Sequence[Track], *, collects: bool = True, note: str = ""
    ) -> None:
        self.exchange, self._tracks, self.note = exchange, tuple(tracks), note
        self._lines = [[Line(f"sum {i}: {stage}") for stage in STAGES] for i in range(len(tracks))]
        self._steps = (self._collect, self._scatter, self._gather, self._spread)
        self._failure = _Failure()
        self._collects = collects
        self._number = 0
        self.is_timed = True
        self.rates: dict[str, float] = {}  # bytes/s that came from devices of other groups in the last step
        self._times: deque[tuple[int, float, float]] = deque(maxlen=4096)  # (stage, begin, end)
        self._end = finalize(self, _close, [line for track in self._lines for line in track])

    def all_reduce(self, buffer: Tensor, key: str, *, exact_tail: int = 0) -> Pending:
        """Start summing `buffer`; see `Wire.all_reduce` in `core/seams.py`."""
        plain = torch.view_as_real(buffer) if buffer.is_complex() else buffer
        flat = plain.view(-1)
        name = key.rpartition(", ")[2]
        if not self.exchange.loses:
            exact_tail = 0
        loses = self.exchange.loses and flat.is_floating_point()
        pieces = self._cut(flat[: len(flat) - exact_tail], name, exact=not loses)
        pieces += self._cut(flat[len(flat) - exact_tail :], name, exact=True)
        for piece in pieces:
            self._put(piece, 0)
        return _Sum(pieces, self._failure, key)

    def between_s(self, seconds: float) -> float:
        """Of the last `seconds`, those in which a piece was on its way between groups.

        Example: one from 0.1 to 0.4 s and one from 0.3 to 0.6 s ago, of the last 0.5 s: 0.4.
        """
        now = time.perf_counter()
        since, spent = now - seconds, 0.0
        for stage, begin, end in sorted(self._times.copy(), key=lambda x: x[1]):
            if STAGES[stage] in BETWEEN and end > since:
                spent += end - max(begin, since)
                since = end
        return spent

    def kept_errors(self) -> list[Tensor]:
        """What this device has not said yet of what it summed, where lanes compress and keep that."""
        return [x for _, ends in self._tracks for end in ends.values() for x in end.kept_errors()]

    def settle(self, *, counts: bool, factor: float = 1.0) -> None:
        """Every sum of a step was waited for; see `Feedback.settle` for what becomes of kept errors."""
        self.rates = {}
        for _, ends in self._tracks:
            for end in ends.values():
                end.settle(counts=counts, factor=factor)
                for device, rate in end.arrivals.take().items():
                    self.rates[device] = max(rate, self.rates.get(device, 0.0))

    def close(self) -> None:
        """Let the stages end; nothing is to be waited for any more."""
        self._end()

    def _cut(self, flat: Tensor, name: str, *, exact: bool) -> list[_Piece]:
        if not len(flat):
            return []
        parts = flat.split(list(self.exchange.sizes(len(flat), flat.element_size())))
        pieces = []
        for i, values in enumerate(parts):
            spans = self.exchange.lane_spans(len(values))
            # By its place in the buffer: what is kept of a piece belongs to the track.
            track = i % len(self._tracks)
            pieces.append(_Piece(values, self._number, (name, i), track, exact, spans))
            self._number += 1
        return pieces

    def _put(self, piece: _Piece, stage: int) -> None:
        if stage == len(STAGES):
            piece.done.set()
            return
        self._lines[piece.track][stage].put(lambda: self._advance(piece, stage))

    def _advance(self, piece: _Piece, stage: int) -> None:
        if self._failure.error is None:
            begin = time.perf_counter()
            try:
                self._steps[stage](piece)
                self._times.append((stage, begin, time.perf_counter()))
            except EvenerError as e:
                self._failure.of(type(e), e.what, e.numbers, e.remedy)
            except Exception as e:
                first_line = (str(e).splitlines() or [type(e).__name__])[0]
                self._failure.of(
                    PeerLostError,
                    f"a sum over groups failed at '{STAGES[stage]}': another device left or went silent "
                    f"({first_line})",
                    "",
                    "look for the first error of the other devices; the job can be started again",
                )
        if self._failure.error is not None:
            self._tracks[piece.track][0].give_up()
            piece.done.set()
            return
        self._put(piece, stage + 1)

    def _collect(self, piece: _Piece) -> None:
        if self._collects:
            self._tracks[piece.track][0].collect(piece.values, piece.number, piece.spans)

    def _scatter(self, piece: _Piece) -> None:
        for number, end in self._tracks[piece.track][1].items():
            values = piece.values[slice(*piece.spans[number])]
            end.scatter(values, piece.number, (*piece.name, number), exact=piece.exact)

    def _gather(self, piece: _Piece) -> None:
        for number, end in self._tracks[piece.track][1].items():
            values = piece.values[slice(*piece.spans[number])]
            end.gather(values, piece.number, (*piece.name, number), exact=piece.exact)

    def _spread(self, piece: _Piece) -> None:
        self._tracks[piece.track][0].spread(piece.values, piece.number, piece.spans)


class _Failure:
    """The first error as its parts: an error that was raised holds the frames that hold the sockets."""

    def __init__(self) -> None:
        self.error: tuple[type[EvenerError], str, str, str] | None = None

    def of(self, kind: type[EvenerError], what: str, numbers: str, remedy: str) -> None:
        if self.error is None:
            self.error = (kind, what, numbers, remedy)


class _Sum:
    def __init__(self, pieces: list[_Piece], failure: _Failure, key: str) -> None:
        self._pieces, self._failure, self._key = pieces, failure, key

    def wait(self) -> None:
        pieces, self._pieces = self._pieces, []
        for piece in pieces:
            # A stage may wait for a lost device while another one knows: the first error ends this wait.
            while not piece.done.wait(LOOK_S) and self._failure.error is None:
                pass
        if pieces and self._failure.error is not None:
            kind, what, numbers, remedy = self._failure.error
            raise kind(f"{self._key}: {what}", numbers=numbers, remedy=remedy)


def _close(lines: list[Line]) -> None:
    for line in lines:
        line.close()
