"""One thread a stage: what was put first is done first, and stages work on different pieces at once."""

import threading
from collections.abc import Callable
from queue import SimpleQueue


class Line:
    """Does what it is given, one after the other, in a thread of its own.

    The thread is a daemon that knows the queue alone: it ends with `close`, also while others wait in vain.
    """

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=_work, args=(self._queue,), name=name, daemon=True).start()

    def put(self, work: Callable[[], None]) -> None:
        """Do `work` after all that was put before; it must not raise."""
        self._queue.put(work)

    def close(self) -> None:
        """End when all that was put is done."""
        self._queue.put(None)


def _work(queue: SimpleQueue) -> None:
    while True:
        work = queue.get()
        if work is None:
            return
        work()
        del work  # what it holds must not live until the next one comes
