"""The typical step: which steps count, and that its parts add up to it."""

import pytest

from evener.errors import UsageError
from evener.report.steps import typical_step
from tests.unit.report.worked import RECORDS, SECONDS, record


def test_the_example_of_the_docstring():
    records = [record(i, s) for i, s in enumerate((1.0, 1.1, 1.2, 9.0))]
    typical = typical_step(records, global_batch=14, warmup_steps=0)
    assert typical.step_s == pytest.approx(1.15)
    assert typical.seconds["lab/a"]["compute"] == pytest.approx(1.0)
    assert typical.seconds["lab/a"]["overhead"] == pytest.approx(1.15 - 1.19)


def test_warmup_is_left_out_and_counted():
    typical = typical_step(RECORDS, global_batch=14, warmup_steps=2)
    assert (typical.step_s, typical.spread) == (pytest.approx(1.2), 0.0)
    assert (typical.steps, typical.steps_used, typical.warmup_steps) == (10, 8, 2)
    assert (typical.loss_first, typical.loss_last) == (5.5, pytest.approx(4.6))
    assert typical.notes == ()


def test_one_stall_moves_neither_the_step_nor_its_parts():
    stalled = record(10, 60.0, seconds={name: {"wait": 60.0} for name in SECONDS})
    calm = typical_step(RECORDS, global_batch=14, warmup_steps=2)
    typical = typical_step((*RECORDS, stalled), global_batch=14, warmup_steps=2)
    assert typical.step_s == calm.step_s
    for device, by_cause in calm.seconds.items():
        assert typical.seconds[device] == pytest.approx(by_cause)


def test_the_causes_of_each_device_sum_to_the_median_step():
    records = [record(i, 1.0 + 0.01 * (i * 7 % 11)) for i in range(11)]
    typical = typical_step(records, global_batch=14, warmup_steps=1)
    for by_cause in typical.seconds.values():
        assert sum(by_cause.values()) == pytest.approx(typical.step_s, abs=1e-12)


def test_spread_is_half_the_distance_of_the_quartiles_over_the_median():
    records = [record(i, s) for i, s in enumerate((0.8, 0.9, 1.0, 1.1, 1.2))]
    assert typical_step(records, global_batch=14, warmup_steps=0).spread == pytest.approx(0.1)


def test_fewer_steps_than_the_warmup_still_report_the_last_and_say_so():
    typical = typical_step(RECORDS[:3], global_batch=14, warmup_steps=5)
    assert typical.step_s == pytest.approx(1.2)
    assert (typical.steps_used, typical.warmup_steps) == (1, 2)
    assert "only 3 steps ran" in typical.notes[0]


def test_skipped_and_odd_sized_steps_are_left_out_and_noted():
    bad = record(10, 7.0, skipped="loss is NaN on lab/b", loss=None)
    short = record(11, 0.3, samples=5)
    typical = typical_step((*RECORDS, bad, short), global_batch=14, warmup_steps=2)
    assert typical.step_s == pytest.approx(1.2)
    assert (typical.steps_used, typical.steps_skipped) == (8, 1)
    assert "1 of 12 steps were skipped" in typical.notes[0]
    assert "1 step had another size" in typical.notes[1]


def test_nothing_to_report_is_an_error():
    with pytest.raises(UsageError, match="global batch 14") as refused:
        typical_step([record(0, skipped="no memory on lab/a")], global_batch=14, warmup_steps=0)
    assert "no memory on lab/a" in refused.value.remedy  # more steps would be skipped as well
    with pytest.raises(UsageError, match="0 steps ran"):
        typical_step([], global_batch=14, warmup_steps=0)


def test_a_device_without_seconds_in_some_steps_is_noted():
    gaps = [record(i, seconds={"lab/a": {"compute": 1.0}} if i % 2 else SECONDS) for i in range(8)]
    typical = typical_step(gaps, global_batch=14, warmup_steps=0)
    assert any(note.startswith("lab/b has no seconds in 2 of 4 steps") for note in typical.notes)


def test_more_seconds_than_the_step_has_are_noted():
    typical = typical_step([record(0, 1.0)], global_batch=14, warmup_steps=0)
    assert any("lab/a" in note and "in doubt" in note for note in typical.notes)


def test_a_step_of_hosts_that_meet_seldom_is_the_mean_of_a_round():
    """Rounds of 2: the warm-up leaves step 3 without its fellow; 4 and 5, 6 and 7 are whole."""
    seconds = [9.0, 9.0, 9.0, 9.0, 1.0, 3.0, 1.0, 3.0]
    records = [
        record(step=i, step_s=s, samples=16, loss=1.0, seconds={"lab/a": {"compute": 1.0, "reduce": s - 1.0}})
        for i, s in enumerate(seconds)
    ]
    typical = typical_step(records, global_batch=16, warmup_steps=3, every=2)
    assert typical.step_s == pytest.approx(2.0)
    assert typical.seconds["lab/a"]["reduce"] == pytest.approx(1.0)
    assert (typical.steps_used, typical.warmup_steps) == (5, 3)
    assert any("mean of up to 2" in note for note in typical.notes)
