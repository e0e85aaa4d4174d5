"""What a person may get wrong in a fleet written by hand."""

import pytest

from evener.core.files import decode
from evener.core.fleet import FAMILIES, Device, Rehearsed
from evener.errors import FileError
from evener.rehearsal.counting import family_of


@pytest.mark.parametrize("threads", [0, -2])
def test_a_device_has_a_thread_or_more(threads: int) -> None:
    with pytest.raises(ValueError, match=f"'lab/a' needs 1 thread or more, got {threads}"):
        Device(name="lab/a", kind="slow", threads=threads)


def test_a_misspelt_family_is_told_with_those_there_are() -> None:
    raw = b'{"factors": {"matmull": 0.5}}'
    with pytest.raises(FileError, match="'matmull', not one of matmul, attention, convolution, other"):
        decode(raw, Rehearsed, "fleet.json")


def test_the_families_are_those_that_a_rehearsal_counts() -> None:
    operations = ("addmm", "_scaled_dot_product_flash_attention_for_cpu", "convolution", "_cdist_forward")
    assert tuple(family_of(name) for name in operations) == FAMILIES
