"""Deadlines to the microsecond on a fake clock."""

import pytest
import torch

from evener.rehearsal.driver import PAUSE_S
from evener.rehearsal.waiting import SPIN_S
from tests.unit.rehearsal.fakes import PRODUCT_S, open_fake, products

TICKS = 1e-4  # the fake clock's own readings


def test_an_action_takes_the_devices_seconds_and_returns_its_result() -> None:
    driver, clock = open_fake()
    for micro_batch in range(2):
        before = driver.now()
        assert driver.run(f"0F{micro_batch}", products(3, clock, 1e-3)) == "done"
        assert driver.now() - before == pytest.approx(3 * PRODUCT_S, abs=1e-12)
        assert 0 <= clock.now_s - driver.now() < TICKS
    assert clock.slept[-1] == pytest.approx(3 * PRODUCT_S - 1e-3 - SPIN_S, abs=TICKS)
    assert (driver.lateness().counted, driver.lateness().actions, driver.lateness().late) == (1, 1, 0)
    assert driver.lateness().total_s == pytest.approx(3 * PRODUCT_S)


def test_wake_ups_that_come_late_do_not_add_up_and_are_not_late_work() -> None:
    driver, clock = open_fake()
    driver.run("0F0", products(3, clock))
    start, clock.overshoot_s = driver.now(), 2e-3
    for micro_batch in range(10):
        driver.run(f"0F{micro_batch}", products(3, clock, 1e-3))
    assert driver.now() - start == pytest.approx(10 * 3 * PRODUCT_S, abs=1e-12)
    assert driver.lateness().late == 0


def test_late_work_is_counted_once_and_caught_up() -> None:
    driver, clock = open_fake()
    driver.run("0F0", products(1, clock))
    start = driver.now()
    driver.run("0F0", products(1, clock, 5e-3))
    once = driver.lateness()
    assert (once.late, once.late_s) == (1, pytest.approx(5e-3 - PRODUCT_S, abs=TICKS))
    driver.run("0F1", products(1, clock, 1e-3))  # still behind, but less so
    assert driver.lateness().late == 1
    driver.run("0F2", products(1, clock, 0.0))
    driver.run("0F3", products(1, clock, 0.0))
    assert driver.now() - start == pytest.approx(4 * PRODUCT_S, abs=1e-12)
    assert clock.now_s - driver.now() < TICKS
    assert driver.lateness().late_s == once.late_s
    assert (once.lag_s, driver.lateness().lag_s) == (once.late_s, 0.0)


def test_a_machine_that_is_too_slow_gets_ever_later() -> None:
    driver, clock = open_fake()
    for micro_batch in range(11):
        driver.run(f"0F{micro_batch}", products(1, clock, 2 * PRODUCT_S))
    lateness = driver.lateness()
    assert lateness.late == lateness.actions == 10
    assert lateness.part == pytest.approx(1.0, abs=0.05)


def test_signatures_have_their_own_cost_and_types_too() -> None:
    driver, clock = open_fake()
    for action, signature, num in (("0F0", 8, 2), ("0F1", 4, 1), ("0B1", 4, 3)):
        driver.run(action, products(num, clock), signature=signature)
        before = driver.now()
        driver.run(action, products(num, clock), signature=signature)
        assert driver.now() - before == pytest.approx(num * PRODUCT_S, abs=1e-12)
    assert driver.lateness().counted == 3


def test_slow_counting_goes_into_the_clock_and_is_not_late() -> None:
    driver, clock = open_fake()
    driver.run("0F0", products(1, clock, 0.5))
    assert driver.now() == pytest.approx(clock.now_s, abs=TICKS)
    assert driver.lateness().late == 0


def test_input_and_unpaced_actions_take_real_time() -> None:
    driver, clock = open_fake()
    for action, num in (("INPUT", 20), ("INPUT", 20), ("STEP", 0), ("STEP", 0), ("STEP", 0)):
        before = driver.now()
        driver.run(action, products(num, clock, 0.03))
        assert driver.now() - before == pytest.approx(0.03, abs=TICKS)
    assert driver.lateness().actions == 0


def test_the_optimisers_first_step_is_not_the_measure() -> None:
    driver, clock = open_fake()
    driver.run("STEP", products(5, clock))
    driver.run("STEP", products(1, clock))
    before = driver.now()
    driver.run("STEP", products(1, clock))
    assert driver.now() - before == pytest.approx(PRODUCT_S, abs=1e-12)


def test_a_launch_in_mid_action_is_placed_by_the_work_done() -> None:
    driver, clock = open_fake()
    launches = []

    def backward() -> None:
        for num in (3, 1):
            products(num, clock)()
            launches.append(driver.launch() - driver.now())
        products(1, clock)()

    driver.run("0B0", backward)
    driver.run("0B1", backward)
    assert launches[2:] == pytest.approx([3 * PRODUCT_S, 4 * PRODUCT_S], abs=1e-12)
    assert driver.launch() == driver.now()
    assert driver.lateness().guessed == 0


def test_an_unrecorded_launch_counts_as_one_at_the_end_and_is_told() -> None:
    driver, clock = open_fake()
    driver.run("0B0", products(2, clock))
    launches = []
    driver.run("0B1", lambda: (products(2, clock)(), launches.append(driver.launch() - driver.now())))
    assert launches == pytest.approx([2 * PRODUCT_S], abs=1e-12)
    assert driver.lateness().guessed == 1


def test_operations_aside_are_not_the_devices() -> None:
    driver, clock = open_fake()

    def work() -> None:
        products(1, clock)()
        with driver.aside():
            products(5, clock)()

    driver.run("0F0", work)
    before = driver.now()
    driver.run("0F0", work)
    assert driver.now() - before == pytest.approx(PRODUCT_S, abs=1e-12)


def test_overhead_is_hidden_and_a_pause_is_not() -> None:
    driver, clock = open_fake()
    driver.run("0F0", products(1, clock))
    start = driver.now()
    clock.now_s += 1e-3
    driver.run("0F0", products(1, clock))
    assert driver.now() - start == pytest.approx(PRODUCT_S, abs=1e-12)
    clock.now_s += 2 * PAUSE_S
    driver.run("0F0", products(1, clock))
    assert driver.now() - start == pytest.approx(2 * PRODUCT_S + 2 * PAUSE_S, abs=TICKS)
    assert driver.lateness().pause_s == pytest.approx(2 * PAUSE_S, abs=TICKS)
    assert driver.lateness().late == 0


def test_advance_waits_and_never_goes_back() -> None:
    driver, clock = open_fake()
    driver.advance(50.2)
    assert driver.now() == 50.2 and clock.now_s >= 50.2
    driver.advance(50.1)
    assert driver.now() == 50.2


def test_an_action_that_waits_in_its_middle_ends_that_much_later() -> None:
    driver, clock = open_fake()
    launched: list[float] = []

    def work(wait_s: float = 0.0) -> None:
        products(1, clock)()
        launched.append(driver.launch())
        driver.advance(launched[-1] + wait_s)
        products(2, clock)()

    driver.run("0F0", work)
    for wait_s in (0.0, 0.3):
        before = driver.now()
        driver.run("0F1", lambda wait_s=wait_s: work(wait_s))
        assert launched[-1] - before == pytest.approx(PRODUCT_S, abs=1e-12)
        assert driver.now() - before == pytest.approx(3 * PRODUCT_S + wait_s, abs=1e-12)


def test_waiting_catches_up() -> None:
    driver, clock = open_fake()
    driver.run("0F0", products(1, clock))
    driver.run("0F1", products(1, clock, 0.05))
    assert driver.lateness().lag_s > 0.04
    driver.advance(driver.now() + 0.1)
    assert driver.lateness().lag_s == 0


def test_a_failing_action_leaves_the_driver_usable() -> None:
    driver, clock = open_fake()
    with pytest.raises(RuntimeError):
        driver.run("0F0", lambda: torch.ones(2) @ torch.ones(3))
    assert driver.launch() == driver.now()
    driver.run("0F0", products(1, clock))
    before = driver.now()
    driver.run("0F1", products(1, clock))
    assert driver.now() - before == pytest.approx(PRODUCT_S, abs=1e-12)
