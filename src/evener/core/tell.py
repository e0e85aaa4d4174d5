"""The one way in which the package speaks to a person beside what a run prints."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE_S = 5.0
"""After which a person is told that something still goes on; then after twice as long, and so on."""


def tell(sentence: str) -> None:
    """`sentence` as a line of its own on standard error, at once, with the name of the package before it."""
    print(f"evener: {sentence}", file=sys.stderr, flush=True)


@contextmanager
def waiting(sentence: str, patience_s: float = PATIENCE_S) -> Iterator[None]:
    """While this lasts longer than `patience_s`, `sentence` is told, with the seconds so far."""
    is_over = threading.Event()

    def remind() -> None:
        so_far, pause = 0.0, patience_s
        while not is_over.wait(pause):
            so_far += pause
            tell(f"{sentence}, {so_far:.0f} s so far")
            pause = so_far

    thread = threading.Thread(target=remind, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
