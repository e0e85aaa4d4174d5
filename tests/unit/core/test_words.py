"""One device is no "1 devices"."""

import pytest

from evener.core.fleet import Device, Fleet
from evener.core.plan import Pipeline, Plan, Share, Stage
from evener.core.split import split_of
from evener.core.words import counted, in_bytes, in_time, printable, some
from evener.errors import UsageError
from evener.report.plans import plan_text


def test_a_number_with_its_word() -> None:
    assert [counted(n, "kind") for n in (0, 1, 2)] == ["0 kinds", "1 kind", "2 kinds"]


def test_a_plan_of_one_device_says_so() -> None:
    stage = Stage(layers=("0",), shares=(Share(devices=("lab/a",), samples=1),))
    plan = Plan(global_batch=1, pipelines=(Pipeline(samples=1, micro_batch=1, stages=(stage,)),))
    assert plan_text(plan).startswith("Plan: 1 sample a step on 1 device, gpipe\n")


def test_a_split_for_one_device_is_counted_right() -> None:
    fleet = Fleet(devices=(Device(name="lab/a", kind="cpu"),))
    with pytest.raises(UsageError, match="has 2 numbers for 1 device\n"):
        split_of("1,2", fleet)


def test_what_cannot_be_seen_is_replaced() -> None:
    assert printable("\x1b[2Ja\u202eb\r\n") == "�[2Ja�b��"
    assert printable("lab1/gpu0 ü 中 −") == "lab1/gpu0 ü 中 −"


def test_of_many_names_the_first_are_told() -> None:
    assert some(["a", "b"], 2) == "a, b"
    assert some(["a", "b", "c", "d", "e"], 2) == "a, b and 3 more"


def test_bytes_are_told_in_a_unit_that_can_be_read() -> None:
    told = [in_bytes(n) for n in (0, 12, 2048, 17.7 * 2**30, 1023 * 2**30, 64e12, 3 * 2**60)]
    assert told == ["0 B", "12 B", "2 KiB", "17.7 GiB", "1023 GiB", "58.2 TiB", "3072 PiB"]
    assert [in_bytes(999.7 * 2**20, digits) for digits in (3, 4)] == ["1000 MiB", "999.7 MiB"]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.9997, "1 s"),
        (0.9997e-3, "1 ms"),
        (0, "0 s"),
        (5e-7, "0.5 µs"),
        (999.7, "16.7 min"),
        (0.0651, "65.1 ms"),
        (12.3, "12.3 s"),
        (3450, "57.5 min"),
        (95_000, "26.4 h"),
        (1e8, "1,157 days"),
    ],
)
def test_a_long_time_is_in_minutes_hours_and_days(seconds: float, words: str) -> None:
    assert in_time(seconds) == words
