"""The rates of a folder's disk: what was timed, what is refused, nothing left behind."""

from itertools import count
from pathlib import Path

import pytest

from evener.errors import FileError, UsageError
from evener.probing.disk import kind_of, measure_disk


def test_rates_are_bytes_by_seconds_of_each_round(tmp_path: Path):
    ticks = count()  # each write and each read takes one second of this clock

    found = measure_disk(
        tmp_path, num_bytes=10_000_000, rounds=2, clock=lambda: float(next(ticks)), kind=lambda _: "ext4"
    )
    for rate in (found.read_bytes_per_s, found.write_bytes_per_s):
        assert (rate.value, rate.source, rate.spread) == (1e7, "measured", 0.05)
    assert next(ticks) == 3 * 2 * 2
    assert found.free_bytes.value > 1 and list(tmp_path.iterdir()) == []
    assert found.seconds(1e7, 2e7) == 3.0


def test_a_folder_in_memory_or_none_is_refused(tmp_path: Path):
    with pytest.raises(UsageError, match="is in memory"):
        measure_disk(tmp_path, kind=lambda _: "tmpfs")
    with pytest.raises(FileError, match="cannot be measured: No such file"):
        measure_disk(tmp_path / "none", kind=lambda _: "ext4")


def test_the_kind_of_a_folder_is_that_of_the_nearest_mount():
    assert kind_of(Path("/proc/self")) == "proc"
