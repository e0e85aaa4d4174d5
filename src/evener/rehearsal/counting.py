"""What an action asks of a device, counted while it really runs: FLOPs, operations, bytes.

torch counts no FLOPs for attention (pytorch#195460) and recurrent layers on a CPU: their formulas are here.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from evener.core.figures import Value

aten = torch.ops.aten
_NO_WORK_NAMESPACES = {"c10d", "profiler", "prim"}  # messages, marks and questions: nothing computed
_NO_WORK = {  # reserve or rename memory, or hand one number to the host
    "_unsafe_view",
    "_local_scalar_dense",
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "detach_",
    "resize_",
    "set_",
}
_GATHERS = {"embedding", "index", "gather", "index_select", "take"}  # read as much of a table as they give
_WRITES_ONLY = {
    "zero_",
    "_foreach_zero_",
    "fill_",
    "ones_like",
    "zeros_like",
    "full_like",
    "new_zeros",
    "new_ones",
}


class Work(Value, frozen=True, kw_only=True):
    """What an action asks: FLOPs by (family, dtype), number of operations, bytes of those without FLOPs.

    Families are "matmul", "attention", "convolution" and "other". Bytes are read plus written.
    Example: x @ y of two 100 × 100 float32 matrices is {("matmul", "float32"): 2e6}, 1 operation, 0 bytes.
    """

    flops: dict[tuple[str, str], float] = {}
    num_ops: int = 0
    num_bytes: int = 0


def _attention(query, key, value, *args, out_val=None, **kwargs) -> int:
    return sdpa_flop_count(query.shape, key.shape, value.shape)


def _attention_backward(grad_out, query, key, value, *args, out_val=None, **kwargs) -> int:
    return sdpa_backward_flop_count(grad_out.shape, query.shape, key.shape, value.shape)


def _recurrent(x, weight_input, weight_hidden, *args, out_val=None, **kwargs) -> int:
    """One layer, one direction: 2 · steps · samples · (both weight matrices)."""
    return 2 * x.shape[0] * x.shape[1] * (weight_input.numel() + weight_hidden.numel())


def _recurrent_backward(*args, **kwargs) -> int:
    return 2 * _recurrent(*args, **kwargs)


FORMULAS: dict[Any, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    aten.mkldnn_rnn_layer: _recurrent,
    aten.mkldnn_rnn_layer_backward: _recurrent_backward,
    **flop_registry,
}


class Counter(TorchDispatchMode):
    """Adds up every operation run under it; `paused` leaves operations out that are not the device's."""

    def __init__(self) -> None:
        super().__init__()
        self.paused = False
        self._flops: dict[tuple[str, str], float] = {}
        self._num_ops = 0
        self._num_bytes = 0

    def work(self) -> Work:
        """What was counted up to now."""
        return Work(flops=dict(self._flops), num_ops=self._num_ops, num_bytes=self._num_bytes)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.paused or not isinstance(func, torch._ops.OpOverload) or is_free(func):
            return func(*args, **kwargs)
        formula = FORMULAS.get(func._overloadpacket)
        if formula is None:  # inference mode hands over composites whole: count their parts
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        out = func(*args, **kwargs)
        self._num_ops += 1
        if formula is None:
            self._num_bytes += bytes_moved(func, args, kwargs, out)
        else:
            key = (family_of(func._overloadpacket.__name__), dtype_of(args))
            self._flops[key] = self._flops.get(key, 0.0) + formula(*args, **kwargs, out_val=out)
        return out


def is_free(func: torch._ops.OpOverload) -> bool:
    """Whether `func` only makes a view, reserves memory or talks: nothing that a device computes."""
    return func.is_view or func.namespace in _NO_WORK_NAMESPACES or func._overloadpacket.__name__ in _NO_WORK


def family_of(name: str) -> str:
    """The family of an operation with FLOPs, by its name: "mm" is matmul, "convolution" convolution."""
    if "attention" in name:
        return "attention"
    if "conv" in name:
        return "convolution"
    return "matmul" if "mm" in name or "rnn" in name else "other"


def dtype_of(args: Sequence[Any]) -> str:
    """The dtype of the first floating tensor: what the multipliers work in."""
    dtypes = [t.dtype for t in _tensors(args)]
    floating = [d for d in dtypes if d.is_floating_point or d.is_complex] or dtypes
    return str(floating[0]).removeprefix("torch.")


def bytes_moved(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> int:
    """Bytes read and written: all inputs, and the outputs or, where nothing is returned, what is changed."""
    blind = func._overloadpacket.__name__ in _WRITES_ONLY
    inputs = [] if blind else list(_tensors((*args, *kwargs.values())))
    written = sum(_size(t) for t in _tensors((out,)))
    if inputs and func._overloadpacket.__name__ in _GATHERS:
        return 2 * written + sum(_size(t) for t in inputs[1:])
    read = sum(_size(t) for t in inputs)
    if not func._schema.returns:
        given = {**dict(zip((a.name for a in func._schema.arguments), args, strict=False)), **kwargs}
        changed = [a.name for a in func._schema.arguments if a.alias_info and a.alias_info.is_write]
        written = sum(_size(t) for name in changed for t in _tensors((given.get(name),)))
    return read + written


def _size(tensor: torch.Tensor) -> int:
    """Bytes of a tensor; an expanded one is no larger than its storage."""
    num_bytes = tensor.nbytes
    return num_bytes if 0 not in tensor.stride() else min(num_bytes, tensor.untyped_storage().nbytes())


def _tensors(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
