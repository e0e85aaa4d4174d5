"""Threads beside the training."""

import os
import threading

from evener.core.threads import stand_back


def test_who_stands_back_lets_others_go_first() -> None:
    """The thread that asks for it, and those it starts; not the rest of the process."""
    found: list[int] = []

    def nice() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    def beside() -> None:
        stand_back()
        found.append(nice())
        inner = threading.Thread(target=lambda: found.append(nice()))
        inner.start()
        inner.join()

    before = nice()
    thread = threading.Thread(target=beside)
    thread.start()
    thread.join()
    assert found == [19, 19] and nice() == before
