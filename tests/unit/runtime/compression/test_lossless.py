"""All bits of any values come back, in no more bytes than they have."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evener.errors import ReductionMismatchError
from evener.runtime.compression.lossless import packed, unpack

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32)


def message(values: torch.Tensor) -> torch.Tensor:
    out = torch.empty(values.nbytes, dtype=torch.uint8)
    return out[: packed(values, out)]


def bits(values: torch.Tensor) -> bytes:
    return values.view(torch.uint8).numpy().tobytes()


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(DTYPES), st.integers(0, 70_000), st.integers(0, 99), st.booleans())
def test_all_bits_come_back(dtype: torch.dtype, count: int, seed: int, noise: bool) -> None:
    """Of normal values, and of any bits at all: NaN with a payload, the sign of a zero, denormals."""
    draws = torch.Generator().manual_seed(seed)
    values = torch.randn(count, generator=draws).mul(100).to(dtype)
    if noise:
        whole = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=draws)
        values = whole.view(dtype)
    told = message(values)
    assert len(told) <= values.nbytes
    found = torch.empty_like(values)
    unpack(told, found)
    assert bits(found) == bits(values)


@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.float32, 0.85), (torch.float64, 0.91), (torch.bfloat16, 0.70)]
)
def test_normal_values_take_fewer_bytes(dtype: torch.dtype, most: float) -> None:
    values = torch.randn(100_000, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert len(message(values)) <= most * values.nbytes


def test_what_came_can_be_added() -> None:
    values, there = torch.randn(1000), torch.randn(1000)
    expected = there + values
    unpack(message(values), there, adds=True)
    assert torch.equal(there, expected)


@pytest.mark.parametrize("cut", [1, 50, 300])
def test_a_message_of_other_values_is_refused(cut: int) -> None:
    told = message(torch.randn(1000))
    with pytest.raises(ReductionMismatchError, match="lossless"):
        unpack(told[:-cut], torch.empty(1000))


def test_a_message_that_would_grow_without_end_is_cut_off() -> None:
    """A megabyte of one value is 130 kB of code: no more of it is unpacked than there are values."""
    told = message(torch.zeros(2**20))
    code = told[3 * 2**20 :]
    with pytest.raises(ReductionMismatchError, match="4097 or more of 4096"):
        unpack(torch.cat([torch.zeros(3 * 4096, dtype=torch.uint8), code[:4000]]), torch.empty(4096))
