"""Headers and payloads: everything that may cross a cut comes back as it was, and nothing else is read."""

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evener.errors import ReductionMismatchError, UsageError
from evener.runtime.channels import messages
from evener.runtime.channels.messages import layout_of, pack, put, take, unpack, views_of

CPU = torch.device("cpu")
KEY = "1SEND_F2 of step 3"
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32]
DTYPES += [torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128]


def through(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What arrives of `tensors`, by way of bytes."""
    layout = layout_of(tensors)
    payload = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    put(tensors, views_of(layout, payload))
    header = unpack(pack(KEY, 1.5, layout) + b"what follows", "h/a")
    assert (header.key, header.moment_s, header.layout) == (KEY, 1.5, layout)
    return take(header.layout, views_of(header.layout, payload), CPU)


def same(sent: torch.Tensor, got: torch.Tensor) -> None:
    assert got.dtype == sent.dtype and got.shape == sent.shape
    assert got.requires_grad == sent.requires_grad and got.is_leaf
    assert torch.equal(got, sent.detach())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(dtype: torch.dtype) -> None:
    sent = (torch.randn(3, 5) * 10).to(dtype)
    (got,) = through(sent)
    same(sent, got)
    assert got.data_ptr() != sent.data_ptr()


def test_a_float8_travels_as_bytes() -> None:
    sent = torch.randn(7).to(torch.float8_e4m3fn)
    (got,) = through(sent)
    assert got.dtype == sent.dtype and torch.equal(got.view(torch.uint8), sent.view(torch.uint8))


@given(
    st.lists(
        st.tuples(
            st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=4), st.booleans(), st.booleans()
        ),
        max_size=6,
    )
)
def test_any_tuple(kinds: list[tuple[torch.dtype, list[int], bool, bool]]) -> None:
    """Scalars, 0 samples, transposed memory, leaves and results, and no tensor at all."""
    sent = []
    for dtype, shape, needs_grad, transposed in kinds:
        tensor = (torch.randn(shape) * 3).to(dtype)
        if transposed:
            tensor = tensor.permute(list(reversed(range(tensor.dim()))))
        if needs_grad and (dtype.is_floating_point or dtype.is_complex):
            tensor = tensor.requires_grad_() * 1
        sent.append(tensor)
    got = through(*sent)
    assert len(got) == len(sent)
    for a, b in zip(sent, got, strict=True):
        same(a, b)


def test_tensors_lie_at_multiples_of_64() -> None:
    layout = layout_of((torch.ones(3), torch.ones(2, dtype=torch.bool)))
    assert [(s.start, s.num_bytes) for s in layout.specs] == [(0, 12), (64, 2)]
    assert layout.num_bytes == 66


def test_what_cannot_be_sent_is_named() -> None:
    with pytest.raises(UsageError, match="uint16"):
        layout_of((torch.ones(2, dtype=torch.uint16),))
    with pytest.raises(UsageError, match="700 tensors"):
        layout_of((torch.ones(1, 1, 1, 1),) * 700)
    with pytest.raises(UsageError, match="too large"):
        layout_of((torch.empty(2**37, dtype=torch.uint8, device="meta"),))
    with pytest.raises(UsageError, match="300 bytes"):
        pack("k" * 300, 0.0, layout_of(()))


GOOD = pack(KEY, 0.0, layout_of((torch.ones(2, 3),)))


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        GOOD[:-1],
        b"XXXX" + GOOD[4:],
        GOOD[:6] + struct.pack("<H", 60000) + GOOD[8:],  # specs beyond the end
        GOOD[:8] + struct.pack("<Q", 25) + GOOD[16:],  # payload of another size than the tensors
        GOOD[:-20] + b"\xff" + GOOD[-19:],  # unknown dtype
        GOOD[:-8] + struct.pack("<Q", 2**60),  # more bytes than any machine has
        GOOD[:24] + b"\xff" + GOOD[25:],  # a key that is no text
    ],
)
def test_bytes_that_are_no_message_are_an_error(raw: bytes) -> None:
    with pytest.raises(ReductionMismatchError, match="h/a"):
        unpack(raw, "h/a")


def test_layouts_are_remembered() -> None:
    """What is looked up for each message is only made for each new shape."""
    tensors = (torch.ones(11, 13),)
    layout_of(tensors)
    before = messages._layout.cache_info().misses
    assert layout_of((torch.zeros(11, 13),)) is layout_of(tensors)
    assert messages._layout.cache_info().misses == before
