"""1F1B for stages of any length, against hand-computed cases and a scheduler that plays action by action."""

import random

import pytest

from evener.cost import pipeline
from evener.cost.pipeline import StageTimes, held_at_both_ends, one_f_one_b
from evener.schedules.one_f_one_b import order


def stages(*seconds, send=0.0):
    return [StageTimes(forward_s=s / 3, backward_s=s * 2 / 3, send_s=send) for s in seconds]


@pytest.mark.parametrize(("cut", "seconds"), [((4, 12), 100), ((6, 6), 54), ((5, 9), 77)])
def test_k15(cut, seconds):
    """8 layers on devices of 1 and 3 a layer, 8 micro-batches: Σ t + 7·max t."""
    assert max(one_f_one_b(stages(*cut), 8)) == pytest.approx(seconds)


def test_k15_with_the_longest_stage_first_drains_behind_it():
    """7 + 1: at most the formula's 59; the first stage has its forward left when the last backward comes."""
    assert 56 < max(one_f_one_b(stages(7, 3), 8)) < 59


def test_a_link_makes_the_round_trip_the_pace():
    for send, period_s in ((1, 4), (0, 3)):
        many, few = (max(one_f_one_b(stages(3, 3, send=send), count)) for count in (12, 8))
        assert many - few == pytest.approx(4 * period_s)


def played(times, micro_batches):
    """Every stage does its actions in the schedule's order, each as soon as its data is there."""
    count = len(times)
    todo = [order(s, count, micro_batches) for s in range(count)]
    done, free, at = {}, [t.start_s for t in times], [0] * count
    while any(at[s] < len(todo[s]) for s in range(count)):
        for s in range(count):
            while at[s] < len(todo[s]):
                what, m = todo[s][at[s]]
                last = m == micro_batches - 1
                peer = s - 1 if what == "F" else s + 1
                ready = 0.0
                if 0 <= peer < count:
                    if (what, peer, m) not in done:
                        break
                    link = times[min(s, peer)]
                    ready = done[what, peer, m] + (link.last_send_s if last else link.send_s)
                t = times[s]
                full = t.forward_s if what == "F" else t.backward_s
                small = t.last_forward_s if what == "F" else t.last_backward_s
                free[s] = max(free[s], ready) + (small if last else full)
                done[what, s, m] = free[s]
                at[s] += 1
    return free


def random_stages(r, count):
    return [
        StageTimes(
            forward_s=r.random(),
            backward_s=2 * r.random(),
            send_s=r.choice((0, 1)) * r.random(),
            last_forward_s=r.random(),
            last_backward_s=r.random(),
            last_send_s=r.random(),
            start_s=r.random(),
        )
        for _ in range(count)
    ]


def test_it_agrees_with_playing_the_schedule():
    r = random.Random(0)
    for _ in range(300):
        times, micro_batches = random_stages(r, r.randint(1, 6)), r.randint(1, 12)
        assert one_f_one_b(times, micro_batches) == pytest.approx(played(times, micro_batches))


def test_long_runs_continue_the_steady_state(monkeypatch):
    r = random.Random(1)
    for _ in range(20):
        times = random_stages(r, r.randint(1, 5))
        exact = one_f_one_b(times, 400)
        monkeypatch.setattr(pipeline, "EXACT_ACTIONS", 1500)
        pipeline._ends.cache_clear()
        assert one_f_one_b(times, 400) == pytest.approx(exact, rel=1e-3)
        monkeypatch.undo()


def played_holding_both_ends(times, micro_batches):
    """As `played`, but a transfer keeps its sender and its receiver busy."""
    count = len(times)
    todo = [order(s, count, micro_batches) for s in range(count)]
    done, free, at = {}, [t.start_s for t in times], [0] * count

    def send_s(s, peer, last):
        if not 0 <= peer < count:
            return 0.0
        link = times[min(s, peer)]
        return link.last_send_s if last else link.send_s

    while any(at[s] < len(todo[s]) for s in range(count)):
        for s in range(count):
            while at[s] < len(todo[s]):
                what, m = todo[s][at[s]]
                last, source = m == micro_batches - 1, s - 1 if what == "F" else s + 1
                if 0 <= source < count and (what, source, m) not in done:
                    break
                t = times[s]
                full = t.forward_s if what == "F" else t.backward_s
                small = t.last_forward_s if what == "F" else t.last_backward_s
                begin = max(free[s], done.get((what, source, m), 0.0)) + send_s(s, source, last)
                done[what, s, m] = begin + (small if last else full)
                target = s + 1 if what == "F" else s - 1
                free[s] = done[what, s, m] + send_s(s, target, last)
                at[s] += 1
    return free


def test_transfers_that_hold_both_ends():
    one = held_at_both_ends(stages(3, 6, send=1))
    assert max(one_f_one_b(one, 1)) == pytest.approx(11)
    r = random.Random(1)
    for _ in range(300):
        times, micro_batches = random_stages(r, r.randint(1, 6)), r.randint(1, 12)
        assert one_f_one_b(held_at_both_ends(times), micro_batches) == pytest.approx(
            played_holding_both_ends(times, micro_batches)
        )
