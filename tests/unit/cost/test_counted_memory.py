"""Bytes of stages from what a device counted: saved, work, who keeps an output, the optimiser's step."""

import numpy as np
import pytest

from evener.core.profile import Layer, Profile
from evener.cost.memory import model_bytes, stage_memory

SAVED, WORK, OUTPUT = (10, 20, 5), (3, 30, 8), (4, 6, 2)


def profile(update: int | None = 7, kept: tuple[str, str, str] = ("", "", "")) -> Profile:
    layers = tuple(
        Layer(
            name=f"l{i}",
            num_params=25,
            param_bytes=100,
            saved_bytes_per_sample=SAVED[i],
            saved_bytes=1,
            work_bytes=2,
            work_bytes_per_sample=WORK[i],
            output_bytes_per_sample=OUTPUT[i],
            output_kept=kept[i],
        )
        for i in range(3)
    )
    return Profile(model="m", layers=layers, gradient_bytes=300, state_bytes=600, update_bytes=update)


def by_hand(i: int, j: int, samples: int, in_flight: int, *, recompute: bool = False) -> float:
    """Without ends, walking through the layers."""
    held = (j - i) * (100 + 100 + 200)
    whole = sum(SAVED[i:j]) * samples + (j - i)
    each = max(sum(SAVED[i : k + 1]) + WORK[k] for k in range(i, j)) * samples
    fixed = max(k + 1 - i + 2 for k in range(i, j))
    return held + (0 if recompute else (in_flight - 1) * whole) + each + fixed


@pytest.mark.parametrize(("samples", "in_flight"), [(1, 1), (4, 1), (4, 3)])
def test_the_whole_model_is_its_highest_layer(samples: int, in_flight: int):
    found = stage_memory(model_bytes(profile()), 0, 3, samples=samples, in_flight=in_flight)
    assert found.total == by_hand(0, 3, samples, in_flight)


def test_a_stage_holds_what_its_neighbours_do_not_save():
    cases = ((("", "", ""), 4 + 6), (("behind", "itself", ""), 0), (("itself", "behind", ""), 4 + 6))
    for kept, ends in cases:
        found = stage_memory(model_bytes(profile(kept=kept)), 1, 2, samples=4, in_flight=2)
        assert found.total == by_hand(1, 2, 4, 2) + 4 * (2 * ends + 6), kept  # and the gradient given back


def test_with_recomputing_each_micro_batch_keeps_its_ends_only():
    found = stage_memory(model_bytes(profile()), 1, 3, samples=4, in_flight=2, recompute=True)
    assert found.total == by_hand(1, 3, 4, 2, recompute=True) + 2 * 4 * 4


def test_the_optimisers_step_may_be_the_peak():
    found = stage_memory(model_bytes(profile(update=3000)), 0, 3, samples=1, in_flight=1)
    assert found.total == 3 * 400 + 3000


def test_the_parts_of_a_stage_add_up_to_the_tables_used_in_planning():
    model = model_bytes(profile())
    i, j = np.array([0, 1]), np.array([3, 3])
    table = model.peak(i, j, 4, 2)
    assert [stage_memory(model, a, 3, samples=4, in_flight=2).total for a in (0, 1)] == table.tolist()
