"""The sums of what a device owns, made by a thread beside its own backward.

    half of the step   unit 3: own, b's        unit 2: own, b's        …    always in this order, so that the
    all of it          unit 3: own, b's, c's   unit 2: own, b's, c's   …    same run gives the same bits again

A device's k-th of n micro-batches comes at k/n: c, which has one where others have two, keeps nobody waiting.
It asks for one part ahead, so that a device needs room for two parts of others at a time.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from queue import SimpleQueue

import torch
from torch import Tensor

from evener.core.seams import Arriving, Post
from evener.errors import EvenerError, PeerLostError
from evener.runtime.owning.units import Unit
from evener.runtime.ranks import Ranks
from evener.runtime.wires.lines import Line

LOOK_S = 0.05

Moment = tuple[Fraction, int]
"""How much of their steps devices have done, and the number of a unit."""


class Contribution:
    """This device's own part of a sum: `wait` returns when it was added, or will not be."""

    def __init__(self, values: Tensor, handed_in_s: float | None, adding: "Adding") -> None:
        self.values, self.handed_in_s = values, handed_in_s
        self._adding = adding
        self.added = threading.Event()

    def wait(self) -> None:
        while not self.added.wait(LOOK_S) and not self._adding.has_failed:
            pass
        self._adding.check()


class Adding:
    """Adds up, for every unit in `units`, this device's span: `sums` has it by the unit's number."""

    def __init__(self, units: Sequence[Unit], ranks: Ranks, post: Post, tag: int) -> None:
        self._units, self._ranks, self._post, self._tag = tuple(reversed(units)), ranks, post, tag
        self.sums = {u.number: torch.zeros(_size(u, ranks.here), dtype=u.dtype) for u in units}
        self._own: dict[int, SimpleQueue[Contribution | None]] = {u.number: SimpleQueue() for u in units}
        self._line = Line("owner: adding gradients")
        self._done = threading.Event()
        self._done.set()
        self._error: tuple[type[EvenerError], str, str] | None = None
        self._came_s: dict[Moment, list[float | None]] = {}

    @property
    def has_failed(self) -> bool:
        return self._error is not None

    def begin(self, rounds: Mapping[str, int]) -> None:
        """Begin to take what comes in a step in which each device contributes so often."""
        assert self._done.is_set() or self.has_failed, "a step begins when the one before has been waited for"
        self._done.clear()
        self._line.put(lambda: self._run(dict(rounds)))

    def put(self, unit: int, values: Tensor, handed_in_s: float | None) -> Contribution:
        """This device's own part of the next round of `unit`."""
        own = Contribution(values, handed_in_s, self)
        self._own[unit].put(own)
        return own

    def wait(self) -> dict[Moment, list[float | None]]:
        """Return when all sums are there; by moment, in their order, when its parts were handed in."""
        while not self._done.wait(LOOK_S) and not self.has_failed:
            pass
        self.check()
        came_s, self._came_s = self._came_s, {}
        return came_s

    def check(self) -> None:
        """Raise what ended the thread's work, if anything did."""
        if self._error is not None:
            kind, what, remedy = self._error
            raise kind(what, remedy=remedy)

    def close(self) -> None:
        """Let the thread end; one that waits for a lost device ends with that device's group."""
        self._error = self._error or (PeerLostError, "the sums of owned gradients have ended", "")
        for queue in self._own.values():
            queue.put(None)
        self._line.close()

    def _run(self, rounds: dict[str, int]) -> None:
        try:
            self._add_all(rounds)
        except EvenerError as e:
            # As its parts: an error that was raised holds the frames that hold the sockets.
            self._error = (type(e), e.what, e.remedy)
        except Exception as e:
            self._error = (EvenerError, f"adding gradients failed: {type(e).__name__}: {e}", "")
        finally:
            self._done.set()

    def _add_all(self, rounds: dict[str, int]) -> None:
        here = self._ranks.here
        came_s: dict[Moment, list[float | None]] = {}
        parts = _in_order(self._units, rounds)
        if not parts:
            for total in self.sums.values():
                total.zero_()
        begun: set[int] = set()
        coming = self._asked([(u, d) for _, u, d in parts if d != here])
        for place, unit, device in parts:
            total, came = self.sums[unit.number], came_s.setdefault((place, unit.number), [])
            begins = unit.number not in begun
            begun.add(unit.number)
            if device == here:
                own = self._own[unit.number].get()
                if own is None:
                    return
                _add(total, own.values, begins=begins)
                came.append(own.handed_in_s)
                own.values = total[:0]
                own.added.set()
                continue
            values, arriving = next(coming)
            arriving.wait()
            _add(total, values, begins=begins)
            came.append(arriving.sent_s)
        self._came_s = came_s

    def _asked(self, parts: Sequence[tuple[Unit, str]]) -> Iterator[tuple[Tensor, Arriving]]:
        """Parts of others in order, the next one asked for before this one is used."""
        rooms: list[Tensor] = [torch.empty(0, dtype=torch.uint8)] * 2
        ahead: tuple[Tensor, Arriving] | None = None
        for i, (unit, device) in enumerate(parts):
            size = _size(unit, self._ranks.here) * unit.dtype.itemsize
            if rooms[i % 2].numel() < size:
                rooms[i % 2] = torch.empty(size, dtype=torch.uint8)
            values = rooms[i % 2][:size].view(unit.dtype)
            asked = values, self._post.receive(values, device, self._tag + unit.number)
            if ahead is not None:
                yield ahead
            ahead = asked
        if ahead is not None:
            yield ahead


def _in_order(units: Sequence[Unit], rounds: Mapping[str, int]) -> tuple[tuple[Fraction, Unit, str], ...]:
    """(how much of its step a device has done, unit, device) of all parts, as they are added.

    Example: one unit, rounds of 2 for a and 1 for b: a at 1/2, a at 1, b at 1.
    """
    parts = [
        (Fraction(k + 1, n), place, unit, device)
        for device, n in rounds.items()
        for k in range(n)
        for place, unit in enumerate(units)
    ]
    return tuple((done, unit, d) for done, _, unit, d in sorted(parts, key=lambda part: part[:2]))


def _size(unit: Unit, device: str) -> int:
    first, last = unit.spans[device]
    return last - first


def _add(total: Tensor, values: Tensor, *, begins: bool) -> None:
    if begins:
        total.copy_(values)
    else:
        total.add_(values)
