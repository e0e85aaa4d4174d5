"""Threads beside the training that must not take its processor time."""

import os
import sys
import threading
from contextlib import suppress

NICE = 19


def stand_back() -> None:
    """Let everything else go first: the calling thread, and those it starts, get what processors have over.

    On Linux a nice value is a thread's own: that of 19 weighs 15 beside 1024 for 0, 1.4 % of a core that is
    always busy. Elsewhere it would be the whole process's, and nothing is changed.
    """
    if sys.platform == "linux":
        with suppress(OSError):  # a container may forbid it; then it is one more thread among others
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
