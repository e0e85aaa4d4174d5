"""The pictures in the schedules' comments are what the schedules do."""

import pytest

from evener.core.actions import parse_schedule
from evener.schedules import check, gpipe, interleaved, make, one_f_one_b, picture, zero_bubble
from tests.unit.schedules.plans import chain, data_parallel

FOUR = ["d/0", "d/1", "d/2", "d/3"]


@pytest.mark.parametrize(
    ("module", "name", "devices", "num_micro_batches"),
    [
        (gpipe, "gpipe", FOUR, 4),
        (one_f_one_b, "1f1b", FOUR, 5),
        (zero_bubble, "zero-bubble", FOUR, 6),
        (interleaved, "interleaved", ["d/0", "d/1", "d/0", "d/1"], 4),
    ],
)
def test_the_comment_shows_the_schedule(module, name, devices, num_micro_batches):
    plan = chain(devices, num_micro_batches)
    schedule = make(plan, name=name)
    drawn = [line.strip() for line in module.__doc__.splitlines() if line.strip().startswith("d/")]
    assert drawn == picture(schedule, plan).splitlines()
    assert check(schedule, plan) == []
    assert parse_schedule(str(schedule)) == schedule


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zero-bubble"])
def test_printed(name, golden):
    devices = ["d/0", "d/1", "d/0", "d/1"] if name == "interleaved" else FOUR
    golden(f"schedule-{name}.txt", str(make(chain(devices, 4), name=name)))


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zero-bubble"])
def test_data_parallel_runs_micro_batch_by_micro_batch(name):
    assert str(make(data_parallel(6, 2), name=name)) == (
        "h/0: 0F0 0B0 0F1 0B1 0F2 0B2 0REDUCE_GRAD STEP\nh/1: 1F0 1B0 1REDUCE_GRAD STEP\n"
    )
