"""What a message is on the wire: a header with key, shapes and dtypes, then the tensors' bytes.

    header    magic · sizes · moment · key · for each tensor: dtype, flags, number of dims, dims
    payload   tensor 0 ──┐64   tensor 1 ──┐64   …      each begins at a multiple of 64 bytes

Nothing is pickled; everything read is checked before it is used.
"""

import math
import struct
from functools import lru_cache
from typing import NamedTuple

import torch

from evener.errors import ReductionMismatchError, UsageError

ALIGNMENT = 64
MAX_HEADER_BYTES = 16384
MAX_PAYLOAD_BYTES = 2**36
MAX_KEY_BYTES = 255
_MAX_DIMS = 64
_MAGIC = b"EVm1"
_HEAD = struct.Struct("<4sHHQd")  # magic, bytes of the key, bytes of the specs, bytes of the payload, moment
_SPEC = struct.Struct("<BBH")  # dtype, requires_grad, number of dims
_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}


class Spec(NamedTuple):
    """One tensor of a message; `start` and `num_bytes` say where its bytes are in the payload."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    requires_grad: bool
    start: int
    num_bytes: int


class Layout(NamedTuple):
    """All tensors of a message, the same as bytes, and how long the payload is."""

    specs: tuple[Spec, ...]
    packed: bytes
    num_bytes: int


class Header(NamedTuple):
    """What stands before a payload. `moment_s` is when it was sent, on the sender's clock."""

    key: str
    moment_s: float
    layout: Layout
    num_bytes: int


class Message(NamedTuple):
    """A message that arrived; `sent_s` is None where the sender's clock is not this host's."""

    key: str
    sent_s: float | None
    tensors: tuple[torch.Tensor, ...]


def layout_of(tensors: tuple[torch.Tensor, ...]) -> Layout:
    """How `tensors` lie in a payload; UsageError for what cannot be sent.

    Example: float32 (3,) and bool (2,) start at 0 and 64, and the payload has 66 bytes.
    """
    return _layout(tuple((t.dtype, t.shape, t.requires_grad) for t in tensors))


@lru_cache(maxsize=1024)
def _layout(kinds: tuple[tuple[torch.dtype, tuple[int, ...], bool], ...]) -> Layout:
    specs, packed, end = [], b"", 0
    for dtype, shape, requires_grad in kinds:
        if dtype not in _CODES:
            raise UsageError(
                f"a tensor of dtype {dtype} cannot be sent to another device",
                remedy=f"one of {', '.join(str(d).removeprefix('torch.') for d in _DTYPES)}",
            )
        spec = _spec(dtype, tuple(shape), requires_grad, end)
        end = spec.start + spec.num_bytes
        packed += _SPEC.pack(_CODES[dtype], requires_grad, len(shape)) + struct.pack(
            f"<{len(shape)}Q", *shape
        )
        specs.append(spec)
    if end > MAX_PAYLOAD_BYTES or len(packed) > MAX_HEADER_BYTES - _HEAD.size - MAX_KEY_BYTES:
        raise UsageError(
            "a message is too large to be sent",
            numbers=f"{len(kinds)} tensors, {end} bytes; at most about 500 and {MAX_PAYLOAD_BYTES}",
            remedy="smaller micro-batches, or a cut that less crosses",
        )
    return Layout(tuple(specs), packed, end)


def _spec(dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool, end: int) -> Spec:
    start = -(-end // ALIGNMENT) * ALIGNMENT
    return Spec(dtype, shape, requires_grad, start, math.prod(shape) * dtype.itemsize)


def pack(key: str, moment_s: float, layout: Layout) -> bytes:
    """The header; UsageError for a key of more than 255 bytes."""
    raw = key.encode()
    if len(raw) > MAX_KEY_BYTES:
        raise UsageError(f"the key of a message has {len(raw)} bytes, at most {MAX_KEY_BYTES}: {key[:80]!r}…")
    return _HEAD.pack(_MAGIC, len(raw), len(layout.packed), layout.num_bytes, moment_s) + raw + layout.packed


def unpack(raw: bytes, source: str) -> Header:
    """The header at the beginning of `raw`; ReductionMismatchError naming `source` for anything else."""
    try:
        magic, key_bytes, spec_bytes, payload_bytes, moment_s = _HEAD.unpack_from(raw)
        specs_at = _HEAD.size + key_bytes
        end = specs_at + spec_bytes
        if magic != _MAGIC or end > len(raw):
            raise ValueError("it does not begin like one or was cut off")
        layout = _unpack_layout(bytes(raw[specs_at:end]))
        if layout.num_bytes != payload_bytes:
            raise ValueError(f"its tensors have {layout.num_bytes} bytes and it says {payload_bytes}")
        return Header(bytes(raw[_HEAD.size : specs_at]).decode(), moment_s, layout, end)
    except (struct.error, ValueError, IndexError) as e:
        raise unreadable(source, str(e)) from e


@lru_cache(maxsize=1024)
def _unpack_layout(packed: bytes) -> Layout:
    specs, at, end = [], 0, 0
    while at < len(packed):
        code, requires_grad, num_dims = _SPEC.unpack_from(packed, at)
        at += _SPEC.size
        if num_dims > _MAX_DIMS or requires_grad > 1:
            raise ValueError(f"a tensor with {num_dims} dimensions and flags {requires_grad}")
        shape = struct.unpack_from(f"<{num_dims}Q", packed, at)
        at += 8 * num_dims
        spec = _spec(_DTYPES[code], shape, bool(requires_grad), end)
        end = spec.start + spec.num_bytes
        specs.append(spec)
    if end > MAX_PAYLOAD_BYTES:
        raise ValueError(f"a payload of {end} bytes")
    return Layout(tuple(specs), packed, end)


def views_of(layout: Layout, payload: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors of `layout` as they lie in the bytes `payload`."""
    return tuple(
        payload.narrow(0, s.start, s.num_bytes).view(s.dtype).view(s.shape)
        if s.num_bytes
        else torch.empty(s.shape, dtype=s.dtype)
        for s in layout.specs
    )


def put(tensors: tuple[torch.Tensor, ...], views: tuple[torch.Tensor, ...]) -> None:
    """Copy `tensors` to where they are to lie, from whatever device they are on."""
    for tensor, view in zip(tensors, views, strict=True):
        view.copy_(tensor.detach())


def take(layout: Layout, views: tuple[torch.Tensor, ...], device: torch.device) -> tuple[torch.Tensor, ...]:
    """New tensors on `device` as the `views` are; leaves where the sender's needed a gradient."""
    taken = tuple([view.to(device, copy=True) for view in views])
    for tensor, spec in zip(taken, layout.specs, strict=True):
        if spec.requires_grad:
            tensor.requires_grad_()
    return taken


def unreadable(source: str, why: str) -> ReductionMismatchError:
    """The error for bytes that are no message."""
    return ReductionMismatchError(
        f"what {source} sent is no message of this version: {why}",
        remedy="the same version of evener on all hosts",
    )
