import queue
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from evener.runtime.wire import GroupWire
from evener.session import pulse as pulse_module
from evener.session.pulse import GONE, SILENT_S, Pulse, begun_key, is_counting, pulse_key


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Lost:
    """A store that cannot be reached."""

    def __init__(self) -> None:
        self.is_up = True

    def set(self, *_) -> None:
        if not self.is_up:
            raise RuntimeError("Connection reset by peer\nmore lines")

    def check(self, _) -> bool:
        return False


def pair() -> tuple[Pulse, Pulse, Clock, list[str]]:
    store, clock, woken = dist.HashStore(), Clock(), []
    a, b = Pulse(store, "a", clock), Pulse(store, "b", clock)
    a.patience_s = b.patience_s = SILENT_S
    a.watch(1, ["b"], woken.append)
    b.watch(1, ["a"], lambda reason: None)
    return a, b, clock, woken


def time_passes(clock: Clock, seconds: float, *looking: Pulse) -> None:
    for _ in range(round(10 * seconds)):
        clock.now += 0.1
        for pulse in looking:
            pulse.look()


def test_a_device_that_counts_is_alive_however_long_it_computes():
    a, b, clock, woken = pair()
    for _ in range(50):
        clock.now += 0.1
        b.look()
        a.look()
    assert not woken and not a.lost


def test_a_silent_device_wakes_who_waits_within_a_second():
    a, b, clock, woken = pair()
    b.look()
    a.look()
    for _ in range(20):
        clock.now += 0.1
        a.look()
    assert woken[0].startswith("b was silent for ") and woken[0] == woken[-1] == a.alarm
    assert list(a.lost) == ["b"]
    b.look()  # it was only slow to be scheduled
    a.look()
    assert not a.lost


def test_who_begins_to_wait_after_the_alarm_is_woken_too():
    """Story: a device was lost just before a group was formed, whose sockets opened after the alarm."""
    a, _, clock, woken = pair()
    a._store.set(pulse_key("b"), GONE)
    a.look()
    before = len(woken)
    clock.now += 0.1
    a.look()
    assert len(woken) == before + 1
    a.watch(2, [], woken.append)
    a.look()
    assert len(woken) == before + 1 and a.alarm is None


def test_a_device_that_has_not_started_yet_is_waited_for():
    """Story: the first process took the others for lost while they were still loading torch."""
    store, clock, woken = dist.HashStore(), Clock(), []
    a = Pulse(store, "a", clock)
    a.patience_s = SILENT_S
    a.watch(1, ["b"], woken.append)
    time_passes(clock, 30, a)
    assert not woken
    b = Pulse(store, "b", clock)
    a.look()
    b.look()
    a.look()
    time_passes(clock, 1.1, a)
    assert woken


def test_on_a_busy_machine_silence_is_borne_for_longer():
    """Story: thirty processes on two cores, and live devices were taken for lost again and again."""
    a, b, clock, woken = pair()
    for _ in range(5):
        clock.now += 0.5  # this device's own thread wakes late, too
        b.look()
        a.look()
    for _ in range(16):
        clock.now += 0.1
        a.look()
    assert not woken
    for _ in range(10):
        clock.now += 0.1
        a.look()
    assert woken


def test_silence_is_not_forgotten_with_the_generation():
    """Story: each roll call waited for the silent device anew, so losing it took twice as long."""
    a, b, clock, woken = pair()
    b.look()
    a.look()
    time_passes(clock, 0.6, a)
    a.watch(2, ["b"], woken.append)
    time_passes(clock, 0.4, a)
    assert woken


def test_a_process_that_was_seen_to_end_is_lost_at_once():
    a, _, clock, woken = pair()
    a._store.set(pulse_key("b"), GONE)
    clock.now += 0.01
    a.look()
    assert woken == ["the process of b has ended"] and a.lost == {"b": GONE}


def test_the_next_generation_of_another_device_is_noticed():
    a, _, _, woken = pair()
    a._store.set(begun_key(2), "b")
    a.look()
    assert woken == ["another device has noticed a change"]


def test_who_cannot_reach_the_store_for_long_is_cut_off():
    clock, woken, store = Clock(), [], Lost()
    a = Pulse(store, "a", clock)
    a.watch(1, [], woken.append)
    store.is_up = False
    clock.now += 0.5
    a.look()
    assert not woken
    clock.now += 0.5
    a.look()
    assert woken == ["the job's store was not reached for 1.0 s: Connection reset by peer"]


def test_a_wait_that_nothing_ends_ends_the_process(monkeypatch):
    """Story: a stopped process went on in a sum whose peers had gone, and shut sockets did not end it."""
    a = pair()[0]
    a._store.set(pulse_key("b"), GONE)
    gone: list[str] = []
    turns = iter([False] * 80 + [True])
    monkeypatch.setattr(a, "_over", SimpleNamespace(wait=lambda _: next(turns)))
    monkeypatch.setattr(a, "_give_up", gone.append)
    a._run()
    assert not gone  # the main thread is in a test, which may take its time
    turns = iter([False] * 80 + [True])
    monkeypatch.setattr(pulse_module, "_waits_in_a_sum", lambda: True)
    a._run()
    assert gone[0] == "a waits in a sum that nothing ends, and goes: the process of b has ended"


@pytest.mark.parametrize("where", ["wait", "all_reduce"])
def test_a_sum_is_known_by_where_the_main_thread_is(where: str):
    """Waiting for a sum, or for others to come to a group whose library connects in its first one."""
    blocked, seen = queue.SimpleQueue(), []  # whose `get` waits in C, as a library does

    def look() -> None:
        end = time.monotonic() + 20
        while not (found := pulse_module._waits_in_a_sum()) and time.monotonic() < end:
            continue
        seen.append(found)
        blocked.put(SimpleNamespace(wait=bool))

    at_once = SimpleNamespace(wait=blocked.get)
    group = SimpleNamespace(allreduce=blocked.get if where == "all_reduce" else lambda _: at_once)
    assert not pulse_module._waits_in_a_sum()
    thread = threading.Thread(target=look)
    thread.start()
    GroupWire(group).all_reduce(torch.zeros(1), "step 0, bucket 0").wait()
    thread.join(20)
    assert seen == [True]


def test_a_device_counts_if_somebody_does_so_for_it_now():
    """Story: a guest took the name of a device of the job, counted for it, and was told to be more alike."""
    store = dist.HashStore()
    assert not is_counting(store, "a")
    store.set(pulse_key("a"), "7")
    assert not is_counting(store, "a", 0.1)
    pulse = Pulse(store, "a")
    pulse.start()
    assert is_counting(store, "a", 5.0)
    pulse.stop()
    store.set(pulse_key("a"), GONE)
    assert not is_counting(store, "a")
