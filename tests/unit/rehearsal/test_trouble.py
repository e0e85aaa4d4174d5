"""Slow spells and heavy-tailed noise on a paced device."""

from statistics import median

import pytest

from evener.rehearsal.trouble import Trouble
from tests.unit.rehearsal.fakes import PRODUCT_S, open_fake, products


def test_a_spell_multiplies_what_actions_take_until_it_ends():
    driver, clock = open_fake()
    driver.run("0F0", products(1, clock))
    taken = []
    driver.slow(3.0, for_s=4 * PRODUCT_S)
    for m in range(4):
        before = driver.now()
        driver.run(f"0F{m}", products(1, clock))
        taken.append(driver.now() - before)
    assert taken == pytest.approx([3 * PRODUCT_S, 3 * PRODUCT_S, PRODUCT_S, PRODUCT_S])


def test_spells_multiply_and_last_for_good_without_an_end():
    driver, clock = open_fake()
    driver.run("0F0", products(1, clock))
    driver.slow(3.0)
    driver.slow(2.0)
    before = driver.now()
    driver.run("0F1", products(1, clock))
    assert driver.now() - before == pytest.approx(6 * PRODUCT_S)


def test_a_reduction_in_a_slow_action_is_launched_that_much_later():
    driver, clock = open_fake()
    launches: list[float] = []

    def work() -> None:
        products(1, clock)()
        launches.append(driver.launch())
        products(1, clock)()

    driver.run("0B0", work)
    driver.slow(3.0)
    before = driver.now()
    driver.run("0B1", work)
    assert launches[1] - before == pytest.approx(3 * PRODUCT_S)
    assert driver.now() - before == pytest.approx(6 * PRODUCT_S)


def test_noise_is_heavy_tailed_and_repeats_with_its_seed():
    trouble, again = Trouble(), Trouble()
    trouble.disturb(0.5, "7 lab/a")
    again.disturb(0.5, "7 lab/a")
    draws = [trouble.factor(0.0) for _ in range(20_000)]
    assert draws[:100] == [again.factor(0.0) for _ in range(100)]
    assert min(draws) >= 1.0 and max(draws) <= 1 + 0.5 * 30
    assert median(draws) == pytest.approx(1 + 0.5 * (2**0.5 - 1), rel=0.02)
    assert sum(d > 1 + 0.5 * 10 for d in draws) / len(draws) == pytest.approx(1 / 121, rel=0.2)
    assert sum(draws) / len(draws) == pytest.approx(1 + 0.5, rel=0.05)
