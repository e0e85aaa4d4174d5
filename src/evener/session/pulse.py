"""Every device says that it lives; who falls silent, or is said to be gone, wakes those who wait for it.

A process that is stopped or cut off closes no socket, so its peers would wait for it without end. Each
process therefore counts upwards in the job's store; a count that stands still for `SILENT_S` is a lost
device. The thread has a connection of its own: the main thread may hold the other one while it waits.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import torch.distributed as dist

from evener.core.tell import tell
from evener.session.meeting import OVER

EVERY_S = 0.1
SILENT_S = 0.9  # a device that computes still counts: this is for one that is stopped, gone or cut off
UNBORN_S = 120.0  # before the first step: loading torch and its compiler holds a thread up for long
SLACK, FORGET = 3.0, 0.97  # how much more silence is borne for own lateness, and how fast that fades a look
UNWAKEABLE_S = 6.0  # of waiting on although all connections were ended
STUCK_S = 3.0  # of one look at the job's store
GONE = "gone"


def pulse_key(device: str) -> str:
    """Where `device` counts; whoever sees its process end writes GONE there."""
    return f"pulse/{device}"


def is_counting(store: dist.Store, device: str, seconds: float = SILENT_S) -> bool:
    """Whether a process counts for `device` now: looks for so long, and writes nothing."""
    key, end = pulse_key(device), time.monotonic() + seconds
    if not store.check([key]):
        return False
    before = store.get(key)
    while before != GONE.encode() and time.monotonic() < end:
        if store.get(key) != before:
            return True
        time.sleep(EVERY_S / 4)
    return False


def begun_key(generation: int) -> str:
    """Set as soon as one device has left the generation before."""
    return f"generation/{generation}/begun"


class Pulse:
    """Counts for the device `here`, and watches the others of a generation.

    `look()` is one round, given the time; `start()` makes a thread do it ten times a second. `store` must be
    a connection that nobody else uses. `patience_s` is how long a device may be silent.
    """

    def __init__(
        self,
        store: dist.Store,
        here: str,
        clock: Callable[[], float] = time.monotonic,
        cut_off: Callable[[], object] = lambda: None,
    ) -> None:
        self._store, self.here, self._clock, self._cut_off = store, here, clock, cut_off
        self._give_up: Callable[[str], object] = _leave
        self._count = self._num_looks = 0
        self._watched: tuple[str, ...] = ()
        self._generation = 0
        self._heard: dict[str, tuple[bytes, float]] = {}
        self._lost: dict[str, str] = {}
        self._wake: Callable[[str], object] = lambda reason: None
        self.patience_s = self._unborn_s = UNBORN_S
        self.is_over = False  # whether the job was brought to an end
        self._reached_s = self._looked_s = clock()
        self._late_s = 0.0
        self._held_until_s = clock()
        self._over = threading.Event()
        self._lock = threading.Lock()
        self.alarm: str | None = None
        self._store.set(pulse_key(here), "0")

    def start(self) -> None:
        """Look ten times a second from now on."""
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)
        self._thread.start()
        threading.Thread(target=self._guard, name="pulse guard", daemon=True).start()

    def stop(self) -> None:
        """Count no more: the others will take this device for gone."""
        self._over.set()
        self._thread.join(STUCK_S)  # it may hang in a store that nothing reaches

    def hold(self, seconds: float) -> None:
        """Neither count nor listen for so long, as if nothing could be reached."""
        self._held_until_s = self._clock() + seconds

    def move(self, store: dist.Store, unborn_s: float) -> None:
        """From now on count and listen at `store`, where the others are to come within `unborn_s`."""
        with self._lock:
            store.set(pulse_key(self.here), str(self._count))
            self._store, self._unborn_s = store, unborn_s
            self._watched, self._heard, self._lost, self.alarm = (), {}, {}, None
            self._reached_s = self._looked_s = self._clock()
            self._late_s = 0.0

    def watch(self, generation: int, others: Sequence[str], wake: Callable[[str], object]) -> None:
        """From now on `wake(reason)` is called when one of `others` is lost or leaves `generation`.

        Again and again until the next watch: what is waited for may have been opened since. No call of an
        earlier `wake` is under way once this returns.
        """
        with self._lock:
            now = self._clock()
            self._generation, self._watched, self._wake = generation, tuple(others), wake
            # Who was silent in the generation before has been so since then.
            self._heard = {device: self._heard.get(device, (b"", now)) for device in others}
            self._lost = {d: why for d, why in self._lost.items() if d in others}
            self.alarm = None

    def ignore(self, devices: Collection[str]) -> None:
        """These may go: they have handed over what they held."""
        with self._lock:
            self._watched = tuple(d for d in self._watched if d not in devices)

    @property
    def lost(self) -> dict[str, str]:
        """Devices that are gone or silent, and how that was noticed."""
        return dict(self._lost)

    @property
    def is_cut_off(self) -> bool:
        """Whether the job's store, and so the job, is out of reach."""
        return self._clock() - self._reached_s >= STUCK_S

    def wait_for_alarm(self, seconds: float) -> bool:
        """Whether there is an alarm, or comes one within `seconds`."""
        end = self._clock() + seconds
        while self.alarm is None and self._clock() < end:
            time.sleep(EVERY_S / 4)
        return self.alarm is not None

    def look(self) -> None:
        """Count, and see whether all others do; may be called from any thread."""
        now = self._clock()
        if now < self._held_until_s:
            return
        # A machine on which this thread wakes late is one on which the others' do: they get more time.
        self._late_s = max(FORGET * self._late_s, now - self._looked_s - EVERY_S)
        self._looked_s = now
        with self._lock:
            try:
                self._count += 1
                self._store.set(pulse_key(self.here), str(self._count))
                found = [self._listen(device, now) for device in self._watched]
                if self._generation and self._store.check([begun_key(self._generation + 1)]):
                    found.append("another device has noticed a change")
                self.is_over = self.is_over or self._store.check([OVER])
                self._reached_s = now
            except RuntimeError as e:
                silent_s = self._clock() - self._reached_s
                found = [f"the job's store was not reached for {silent_s:.1f} s: {_first_line(e)}"]
                if silent_s < SILENT_S:
                    return
            self.alarm = self.alarm or next((sentence for sentence in found if sentence), None)
            if self.alarm is not None:
                self._wake(self.alarm)

    def _listen(self, device: str, now: float) -> str | None:
        key = pulse_key(device)
        count = self._store.get(key) if self._store.check([key]) else b""
        before, since = self._heard[device]
        if count == GONE.encode():
            self._lost[device] = GONE
            return f"the process of {device} has ended"
        if count != before:
            self._heard[device] = (count, now)
            self._lost.pop(device, None)
            return None
        if now - since < (self.patience_s + SLACK * self._late_s if count else self._unborn_s):
            return None
        self._lost[device] = f"silent for {now - since:.1f} s"
        return f"{device} was {self._lost[device]}"

    def _run(self) -> None:
        alarmed = 0
        while not self._over.wait(EVERY_S):
            self.look()
            self._num_looks += 1
            alarmed = alarmed + 1 if self.alarm else 0
            if alarmed * EVERY_S > UNWAKEABLE_S and _waits_in_a_sum():
                self._give_up(f"{self.here} waits in a sum that nothing ends, and goes: {self.alarm}")

    def _guard(self) -> None:
        """A look that hangs is one at a store that no packet reaches: its connections are ended.

        Counted in own turns, not by the clock: a process that was stopped has not looked for long either.
        """
        turns, seen = 0, -1
        while not self._over.wait(EVERY_S):
            turns = turns + 1 if self._num_looks == seen else 0
            seen = self._num_looks
            if turns * EVERY_S > STUCK_S:
                self._cut_off()
                turns = 0


def _waits_in_a_sum() -> bool:
    """Whether the main thread waits in runtime/wire.py or wires/: in no code that may take its time."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_code.co_filename == threading.__file__:
        frame = frame.f_back  # an event, which a sum over groups waits for
    # In `all_reduce` where a vendor's library connects a group in its first sum.
    if frame is None or frame.f_code.co_name not in ("wait", "all_reduce"):
        return False
    return any("wire" in part for part in Path(frame.f_code.co_filename).parts[-2:])


def _leave(sentence: str) -> None:
    """End this process, so that the others need not wait for it."""
    tell(sentence)
    os._exit(2)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
