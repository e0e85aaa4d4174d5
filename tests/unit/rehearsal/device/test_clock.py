import pytest

from evener.rehearsal.device.clock import Clock, Event, Stream
from tests.unit.rehearsal.fakes import FakeClock


def opened(*, host_counts: bool = False) -> tuple[Clock, FakeClock]:
    fake = FakeClock()
    return Clock(host_counts=host_counts, clock=fake, sleep=fake.sleep), fake


def beside(clock: Clock) -> Stream:
    """One more stream, as a program opens one."""
    stream = Stream(clock, clock.next_name())
    clock.add(stream)
    return stream


def test_the_host_runs_ahead_and_sleeps_only_when_it_waits():
    clock, fake = opened()
    assert [clock.queue(2.0), clock.queue(3.0)] == [2.0, 5.0]
    assert clock.host_s == 0 and not fake.slept
    clock.synchronize()
    assert clock.host_s == 5.0 and sum(fake.slept) == pytest.approx(5.0, abs=1e-3)


def test_what_this_machine_overshoots_does_not_add_up():
    clock, fake = opened()
    fake.overshoot_s = 0.3
    for _ in range(10):
        clock.queue(1.0)
        clock.synchronize()
    assert clock.host_s == pytest.approx(10.0)


def test_a_slow_machine_lags_and_catches_up():
    clock, fake = opened()
    clock.queue(1.0)
    fake.now_s += 1.5
    clock.synchronize()
    assert clock.host_s == 1.0 and clock.lag_s == pytest.approx(0.5, abs=1e-3)
    clock.queue(1.0)
    clock.synchronize()
    assert clock.lag_s == 0


def test_a_copy_on_a_stream_of_its_own_runs_beside_the_computing():
    for own, end_s in ((False, 5.0), (True, 3.0)):
        clock, _ = opened()
        clock.queue(3.0)
        with beside(clock) if own else clock.stream:
            clock.queue(2.0, "in")
        assert clock.end_s() == end_s


def test_two_streams_share_the_engine_that_computes():
    clock, _ = opened()
    clock.queue(3.0)
    with beside(clock):
        assert clock.queue(2.0) == 5.0


def test_a_stream_waits_for_an_event_of_another():
    clock, _ = opened()
    copies = beside(clock)
    with copies:
        clock.queue(4.0, "in")
    event = copies.record_event()
    event.wait()
    assert clock.queue(1.0) == 5.0 and not event.query()
    event.synchronize()
    assert clock.host_s == 4.0 and event.query()


def test_events_tell_the_time_between_them():
    clock, _ = opened()
    first, last = Event(clock, enable_timing=True), Event(clock, enable_timing=True)
    first.record()
    clock.queue(0.25)
    last.record()
    with pytest.raises(RuntimeError, match="must have happened"):
        first.elapsed_time(last)
    last.synchronize()
    assert first.elapsed_time(last) == pytest.approx(250)
    with pytest.raises(RuntimeError, match="enable_timing"):
        Event(clock).elapsed_time(last)


def test_the_hosts_own_time_counts_if_asked():
    clock, fake = opened(host_counts=True)
    clock.enter()
    clock.queue(1.0)
    fake.now_s += 7.0  # computing the values, which is not the host's time
    clock.leave()
    fake.now_s += 2.0
    clock.enter()
    assert clock.queue(1.0) == pytest.approx(3.0, abs=1e-3)


def test_what_is_spent_on_the_host_delays_what_is_queued_after_it():
    clock, _ = opened()
    clock.spend(2.0)
    assert clock.queue(1.0) == 3.0
