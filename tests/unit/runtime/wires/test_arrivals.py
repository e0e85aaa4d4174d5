"""What a link carries, read off the times at which messages come."""

import pytest

from evener.runtime.wires.arrivals import WINDOW_BYTES, Arrivals

MIB = int(WINDOW_BYTES)


def rates(*messages: tuple[float, str, int]) -> dict[str, float]:
    """Of messages (seconds, source, bytes)."""
    now = [0.0]
    arrivals = Arrivals(clock=lambda: now[0])
    for at, source, num_bytes in messages:
        now[0] = at
        arrivals.note(source, num_bytes)
    found = arrivals.take()
    assert arrivals.take() == {}
    return found


def test_a_stream_has_its_rate_and_pauses_do_not_count() -> None:
    every = [(0.1 * i, "b", MIB) for i in range(4)] + [(5.0 + 0.1 * i, "b", MIB) for i in range(3)]
    assert rates(*every) == {"b": pytest.approx(MIB / 0.1)}


def test_small_messages_make_up_a_window_together() -> None:
    quarter = MIB // 4
    assert rates(*((0.1 * i, "b", quarter) for i in range(12))) == {"b": pytest.approx(quarter / 0.1)}


def test_too_little_says_nothing() -> None:
    assert rates((0.0, "b", 100), (1.0, "b", 100), (2.0, "b", 100)) == {}
    assert rates((0.0, "b", MIB), (1.0, "b", MIB)) == {}
