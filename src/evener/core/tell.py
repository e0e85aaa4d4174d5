"""The one way in which the package speaks to a person beside what a run prints."""

import sys


def tell(sentence: str) -> None:
    """`sentence` as a line of its own on standard error, at once, with the name of the package before it."""
    print(f"evener: {sentence}", file=sys.stderr, flush=True)
