"""What is said of runs in which hosts exchange less often."""

import pytest

from evener.core.fewer import Fewer
from evener.session.layout.fewer import shorter_than_a_round


@pytest.mark.parametrize(("steps", "told"), [(3, True), (15, True), (16, False), (40, False)])
def test_a_run_shorter_than_one_round_is_told(steps: int, told: bool) -> None:
    said = shorter_than_a_round(steps, Fewer(how="local", every=16))
    assert said.startswith(f"the run's {steps} steps are fewer than the 16 of one round") is told
    assert bool(said) is told
