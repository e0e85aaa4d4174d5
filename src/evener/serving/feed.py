"""What a live page is sent: the parts of the document that differ from what it has."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec

from evener.report.page.build import document
from evener.report.page.document import Document, Timeline
from evener.report.page.files import RunFiles
from evener.report.page.timeline import timeline
from evener.serving.follow import Follower

LOOK_S = 1.0
"""No look without an onlooker, and no more than one in this time; a look takes 5 to 10 ms."""
LEAST_PAUSE = 400
"""A look is followed by a pause of so many times its length: looking takes a quarter of a per cent of a core.
The shorter of the last two counts, as one that draws a new timeline stands alone."""
QUIET_S = 15.0
"""After so long without a change something is sent all the same, so that a line that broke is noticed."""
MOST_ONLOOKERS = 16


class Feed:
    """The document of a run that goes on, for any number of onlookers; looks only when one of them asks."""

    def __init__(self, path: str | Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.follower = Follower(path)
        self.closing = False
        self.onlookers = 0
        self._clock, self._lock = clock, threading.Lock()
        self._next_s, self._took_s = float("-inf"), 0.0
        self._document: Document | None = None
        self._parts: dict[str, bytes] = {}
        self._drawn: tuple[tuple[object, ...], Timeline | None] | None = None

    def look(self) -> None:
        """Bring the document up to date, unless that was just done."""
        with self._lock:  # onlookers ask from threads of their own
            self._look()

    def _look(self) -> None:
        now = self._clock()
        if now < self._next_s and not self.closing:
            return
        self._next_s = now + LOOK_S
        if self.follower.look() or self._document is None:
            run = self.follower.run
            if run is not None:
                self._document = document(run, live=True, timeline_of=self._timeline)
                self._parts = {
                    name: msgspec.json.encode(getattr(self._document, name))
                    for name in self._document.__struct_fields__
                }
        took_s = self._clock() - now
        pause_s = LEAST_PAUSE * min(took_s, self._took_s)
        self._next_s, self._took_s = max(self._next_s, now + pause_s), took_s

    @property
    def document(self) -> Document | None:
        """The document as of the last look; None before the run has a plan."""
        return self._document

    @property
    def finished(self) -> bool:
        """Whether the run has written its report."""
        run = self.follower.run
        return run is not None and run.ending is not None

    def changes(self, had: dict[str, bytes]) -> dict[str, bytes]:
        """The parts that differ from `had`, by name, as JSON; `had` then holds them."""
        changed = {name: raw for name, raw in self._parts.items() if had.get(name) != raw}
        had.update(changed)
        return changed

    async def events(self) -> AsyncIterator[bytes]:
        """Server-sent events for one onlooker, until the run is finished or the server closes."""
        self.onlookers += 1
        had: dict[str, bytes] = {}
        quiet_s = 0.0
        try:
            while True:
                await asyncio.to_thread(self.look)
                changed = self.changes(had)
                if changed:
                    yield event("parts", changed)
                    quiet_s = 0.0
                elif quiet_s >= QUIET_S:
                    yield b": still here\n\n"
                    quiet_s = 0.0
                if self.finished or self.closing:
                    yield b"event: end\ndata: {}\n\n"
                    return
                await asyncio.sleep(LOOK_S)
                quiet_s += LOOK_S
        finally:
            self.onlookers -= 1

    def _timeline(self, run: RunFiles) -> Timeline | None:
        """The timeline, made anew only when one of the files behind it has changed."""
        sources = (run.plan, run.traces, run.fleet, run.profile)
        if self._drawn is None or any(a is not b for a, b in zip(self._drawn[0], sources, strict=True)):
            self._drawn = (sources, timeline(run))
        return self._drawn[1]


def event(name: str, parts: dict[str, bytes]) -> bytes:
    """One event whose data is the object of `parts`; JSON has no line breaks, so one line holds it."""
    body = b",".join(msgspec.json.encode(key) + b":" + raw for key, raw in parts.items())
    return b"event: " + name.encode() + b"\ndata: {" + body + b"}\n\n"
