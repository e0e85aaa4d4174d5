"""The bytes of tensors, for hashes, files and messages."""

import torch
from torch import Tensor


def raw(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, flat, in the same memory.

    Not by `reshape(-1)`: a tensor of one value is contiguous whatever its stride, keeps that there, and torch
    then shows no bytes of it. Example: 6 values of float32 are 24 bytes.
    """
    assert tensor.is_contiguous(), f"a tensor of strides {tensor.stride()} lies in another order"
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
