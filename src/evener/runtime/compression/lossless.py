"""All bits in fewer bytes: the byte that has sign and exponent is coded by how often its values occur.

    float32   ±eeeeeee emmmmmmm mmmmmmmm mmmmmmmm
              └─top──┘ └──────as they are───────┘      message: [ low 16 bits ][ next 8 ][ top, by Huffman ]

Gradients of one piece have exponents within a few powers of two, so that byte takes 2.6 to 4 bits of its 8
and the mantissa, which is noise, is left alone: 0.82 to 0.86 of the bytes in float32 (docs/log.md), less in
bfloat16. Where the code is no shorter the byte goes as it is.
"""

import zlib

import torch
from torch import Tensor

from evener.errors import ReductionMismatchError

_LEVEL, _RAW_DEFLATE, _MEMORY = 1, -15, 9
_WHOLE = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_AT_ONCE = 2**15  # values that stay in a core's cache while they are put together
_HALF = {torch.int64: torch.int32, torch.int32: torch.int16, torch.int16: torch.int8}


def packed(values: Tensor, out: Tensor) -> int:
    """Write `values` (flat, of 2, 4 or 8 bytes each) to `out`, bytes, and say how many, at most theirs.

    Example: 1,000 standard normal float32 take about 3,330 bytes of 4,000.
    """
    rest, start = values.view(_WHOLE[values.element_size()]), 0
    while rest.element_size() > 1:
        half = _HALF[rest.dtype]
        end = start + len(values) * half.itemsize
        out[start:end].view(half).copy_(rest)  # keeps the low bits
        rest = (rest >> 8 * half.itemsize).to(half)
        start = end
    coder = zlib.compressobj(_LEVEL, zlib.DEFLATED, _RAW_DEFLATE, _MEMORY, zlib.Z_HUFFMAN_ONLY)
    code = coder.compress(rest.numpy().data) + coder.flush()
    if len(code) >= len(values):
        out[start : values.nbytes].view(torch.int8).copy_(rest)
        return values.nbytes
    out[start : start + len(code)].copy_(torch.frombuffer(bytearray(code), dtype=torch.uint8))
    return start + len(code)


def unpack(data: Tensor, out: Tensor, *, adds: bool = False) -> None:
    """Write what `data` says to `out`; with `adds` add it.

    ReductionMismatchError where it does not say so many values.
    """
    start = len(out) * (out.element_size() - 1)
    code = data[start:]
    if len(data) != out.nbytes:
        coder = zlib.decompressobj(_RAW_DEFLATE)
        try:
            came = coder.decompress(code.numpy().data, len(out) + 1) if len(code) else b""
        except zlib.error:
            came = b""
        if len(came) != len(out) or not coder.eof:
            raise ReductionMismatchError(
                "what came over a lossless lane is not what its message says",
                numbers=f"{len(data)} bytes say {len(came)} or more of {len(out)} values",
                remedy="the same version of evener on all devices",
            )
        code = torch.frombuffer(bytearray(came), dtype=torch.uint8)
    top, end = code.view(torch.int8), start
    lows = []
    for half in _halves(out.element_size()):
        lows.append(data[end - len(out) * half.itemsize : end].view(half))
        end -= len(out) * half.itemsize
    for begin in range(0, len(out), _AT_ONCE):
        piece = slice(begin, begin + _AT_ONCE)
        whole = top[piece]
        for low in lows:
            bits, wide = 8 * low.dtype.itemsize, _WHOLE[2 * low.dtype.itemsize]
            whole = whole.to(wide).bitwise_left_shift_(bits).bitwise_or_(low[piece].to(wide))
        if adds:
            out[piece].add_(whole.view(out.dtype))
        else:
            out[piece].copy_(whole.view(out.dtype))


def _halves(size: int) -> tuple[torch.dtype, ...]:
    """What lies below the top byte of values of `size` bytes, from the top down."""
    return (torch.uint8, torch.uint16, torch.uint32)[: size.bit_length() - 1]
