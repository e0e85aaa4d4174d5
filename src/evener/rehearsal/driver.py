"""A device of the fleet file: real work, then sleep until the device would have been done.

The device's own clock runs from deadline to deadline, so that delays of this machine do not add up:

    clock     ──F0──────────┬──F1──────────┬──wait──┬──STEP──┬     deadline = clock + seconds of the action
    machine   ▓▓▓▓ sleep    ▓▓▓▓▓▓▓ sleep  ▓ sleep  ▓▓ sleep       late only where ▓ passes its deadline
"""

import contextlib
import ctypes
import time
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import msgspec

from evener.core.fleet import Device
from evener.rehearsal.counting import Counter
from evener.rehearsal.pace import seconds
from evener.rehearsal.trouble import Trouble
from evener.rehearsal.verdict import Lateness
from evener.rehearsal.waiting import wait_until

PAUSE_S = 0.25  # longer outside actions than that is a pause (an evaluation, a save), not overhead
_PR_SET_TIMERSLACK = 29
HOST_ACTION = "INPUT"  # getting samples ready is work of this machine, not of the rehearsed device
_MAKES_STATE = "STEP"


class _Known:
    """What counting an action found: its seconds, and how far into it each reduction was launched."""

    def __init__(self, duration_s: float, launches_s: list[float]) -> None:
        self.duration_s = duration_s
        self.launches_s = launches_s


class _Running:
    """The action under way: where it began, and what is known of it or its counter (neither: unpaced)."""

    def __init__(
        self,
        start_s: float,
        begin_s: float,
        known: _Known | None = None,
        counter: Counter | None = None,
        factor: float = 1.0,
    ) -> None:
        self.start_s = start_s  # on the device's clock
        self.begin_s = begin_s  # on this machine's
        self.known = known
        self.counter = counter
        self.factor = factor  # times what the fleet file says
        self.launches_s: list[float] = []


class PacedDriver:
    """A `Driver` that takes the seconds of `device` for every action; also alone, to profile a model on it.

    An action type is counted when it first runs with a signature, and paced from then on; a counted action
    has no timing of its own: it takes what counting really took, where that is longer than the action.
    STEP is counted once more the second time, since its first run also makes the optimiser's state.
    Actions named INPUT, and those that the fleet file gives no figure for, take the time they really take.
    """

    def __init__(
        self,
        device: Device,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._device = device
        self._clock, self._sleep = clock, sleep
        self._now_s = self._left_s = clock()
        self._lag_s = 0.0  # how far this machine was past the device's clock at the last deadline
        self._known: dict[tuple[str, Hashable], _Known] = {}
        self._made_state: set[tuple[str, Hashable]] = set()
        self._running: _Running | None = None
        self._trouble = Trouble()
        self._lateness = Lateness(device=device.name)

    @property
    def device(self) -> Device:
        """The device of the fleet file."""
        return self._device

    def now(self) -> float:
        """Seconds on the device's clock: the last deadline reached; comparable within a host."""
        return self._now_s

    def lateness(self) -> Lateness:
        """How well the clock was kept up to now."""
        return msgspec.structs.replace(self._lateness, lag_s=self._lag_s)

    def slow(self, factor: float, for_s: float | None = None) -> None:
        """From now on every paced action takes `factor` times as long, for `for_s` seconds or for good."""
        self._trouble.slow(factor, self._now_s, for_s)

    def disturb(self, noise: float, seed: str) -> None:
        """From now on every paced action takes a time drawn with a heavy tail, see `Trouble`."""
        self._trouble.disturb(noise, seed)

    def run(self, action: str, work: Callable[[], Any], *, signature: Hashable = ()) -> Any:
        """Do `work` and return its result when the device would have it; see `Driver.run`."""
        self._resume()
        kind = action.rstrip("0123456789")
        known = self._known.get((kind, signature))
        try:
            if kind == HOST_ACTION or (known and not known.duration_s):
                return self._run_unpaced(work)
            if known:
                return self._run_paced(known, work)
            return self._run_counted((kind, signature), work)
        finally:
            self._running = None
            self._left_s = self._clock()

    def on_host(self, work: Callable[[], Any]) -> Any:
        """Do `work`: a CPU is its own host."""
        return work()

    def on_disk(self, read: int, written: int) -> None:
        """A rehearsed CPU's disk is this machine's, in no time of its own."""

    def launch(self) -> float:
        """Seconds on the device's clock at this moment, also in mid-action: where a reduction starts.

        In an action it is start + what the device had done of it when the reduction with this number was
        launched while counting: half of the work of a backward of 10 ms that began at 3 s gives 3.005 s.
        """
        running = self._running
        if running is None:
            return self._now_s
        if running.counter:
            done_s = seconds(running.counter.work(), self.device)
            running.launches_s.append(done_s)
            return running.start_s + max(done_s * running.factor, self._clock() - running.begin_s)
        if running.known is None:
            return running.start_s + self._clock() - running.begin_s
        ordinal = len(running.launches_s)
        done_s = running.known.duration_s
        if ordinal < len(running.known.launches_s):
            done_s = running.known.launches_s[ordinal]
        else:
            self._add(guessed=1)
        done_s *= running.factor
        running.launches_s.append(done_s)
        return running.start_s + done_s

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Operations inside are not the device's: an action being counted leaves them out."""
        counter = self._running.counter if self._running else None
        if counter:
            counter.paused = True
        try:
            yield
        finally:
            if counter:
                counter.paused = False

    def advance(self, until_s: float) -> None:
        """The device waits until `until_s` on its clock; a moment that has passed changes nothing.

        In the middle of a paced action, for what it launched last: it then ends that much later. Any other
        action takes what it really takes, waiting included.
        """
        running = self._running
        if running is not None:
            if running.known is not None and running.launches_s:
                waited_s = max(0.0, until_s - running.start_s - running.launches_s[-1])
                running.start_s += waited_s
                self._now_s += waited_s
            return
        if until_s > self._now_s:
            self._reach(until_s)
        self._left_s = self._clock()

    def _add(self, **more: float) -> None:
        self._lateness = self._lateness.plus(**more)

    def _resume(self) -> None:
        """Time that passed since the last action is overhead, and hidden, unless it is a pause."""
        pause_s = self._clock() - self._left_s
        if pause_s > PAUSE_S:
            self._now_s += pause_s
            self._add(pause_s=pause_s)

    def _run_unpaced(self, work: Callable[[], Any]) -> Any:
        begin_s = self._clock()
        self._running = _Running(self._now_s, begin_s)
        result = work()
        self._now_s += self._clock() - begin_s
        return result

    def _run_paced(self, known: _Known, work: Callable[[], Any]) -> Any:
        factor = self._trouble.factor(self._now_s)
        self._running = _Running(self._now_s, self._clock(), known=known, factor=factor)
        result = work()
        duration_s = known.duration_s * factor
        deadline_s = self._now_s + duration_s
        lag_s = max(0.0, self._clock() - deadline_s)
        late_s = max(0.0, lag_s - self._lag_s)  # lag of the action before is not this one's fault
        self._add(actions=1, total_s=duration_s, late=int(late_s > 0), late_s=late_s)
        self._lag_s = lag_s
        self._reach(deadline_s)
        return result

    def _run_counted(self, key: tuple[str, Hashable], work: Callable[[], Any]) -> Any:
        begin_s, factor = self._clock(), self._trouble.factor(self._now_s)
        with Counter() as counter:
            self._running = running = _Running(self._now_s, begin_s, counter=counter, factor=factor)
            result = work()
        known = _Known(seconds(counter.work(), self.device), running.launches_s)
        if key[0] != _MAKES_STATE or key in self._made_state:
            self._known[key] = known
        self._made_state.add(key)
        self._add(counted=1)
        self._reach(self._now_s + max(known.duration_s * factor, self._clock() - begin_s))
        return result

    def _reach(self, deadline_s: float) -> None:
        if wait_until(deadline_s, self._clock, self._sleep) > 0:
            self._lag_s = 0.0
        self._now_s = deadline_s


def open_driver(device: Device) -> PacedDriver:
    """The paced driver of `device` in this process, which should use one torch thread in a rehearsal."""
    with contextlib.suppress(
        OSError, AttributeError, TypeError
    ):  # only Linux has it; spinning covers the rest
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1000)  # wake within a microsecond: halves the overshoot
    return PacedDriver(device)
