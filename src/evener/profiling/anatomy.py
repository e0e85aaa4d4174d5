"""What one forward pass does, layer by layer: order, FLOPs, output bytes, and bytes kept for backward."""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from evener.core.layers import ROOT
from evener.core.tracebacks import is_out_of_memory, last_line, misplaced, raised_in
from evener.core.words import counted
from evener.errors import EvenerError, ModelError
from evener.profiling.chain import Piece, storage_of

OUTSIDE = ""
"""The name under which what happens outside of every layer is kept: the loss, and code between layers."""


@dataclass(kw_only=True)
class Anatomy:
    """Counts of one forward pass over `micro_batch` samples, by layer name.

    `order` has the layers by first use: a call, or the reading of a weight outside of every layer.
    `output_kept` says who keeps a layer's (largest) output for backward: it "itself", one "behind", nobody.
    """

    micro_batch: int
    order: list[str] = field(default_factory=list)
    flops: Counter[str] = field(default_factory=Counter)
    output_bytes: dict[str, int] = field(default_factory=dict)
    saved_bytes: Counter[str] = field(default_factory=Counter)
    output_kept: dict[str, Literal["", "itself", "behind"]] = field(default_factory=dict)


def anatomy(
    model: nn.Module,
    pieces: Sequence[Piece],
    step_loss: Callable[[nn.Module, Any], torch.Tensor],
    batch: Any,
    micro_batch: int,
) -> Anatomy:
    """Run forward and loss once on `batch` and count.

    Bytes kept for backward are counted by storage, once each, for the first layer that keeps it; parameters
    and buffers do not count. FLOPs are those of the forward pass, CPU attention included.

    Raises ModelError naming the layer in which the model raised; running out of memory is passed on as it is.
    """
    found = Anatomy(micro_batch=micro_batch)
    inside: list[str] = []
    held = [*model.parameters(), *model.buffers()]
    known = {storage_of(t) for t in held if _has_storage(t)}
    counter = FlopCounterMode(display=False, custom_mapping=_cpu_attention())
    at_entry: list[int] = []
    outputs: dict[str, Any] = {}

    def use(name: str) -> None:
        if name not in found.order:
            found.order.append(name)

    def read(name: str) -> None:
        if not inside:
            use(name)

    def enter(name: str) -> Callable:
        def hook(module: nn.Module, args: Any) -> None:
            inside.append(name)
            at_entry.append(counter.get_total_flops())
            use(name)

        return hook

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        name = inside.pop()
        found.flops[name] += counter.get_total_flops() - at_entry.pop()
        tensors = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor)]
        found.output_bytes[name] = sum(t.nbytes for t in tensors)
        largest = max((t for t in tensors if _has_storage(t)), key=lambda t: t.nbytes, default=None)
        if largest is not None:
            outputs[name] = storage_of(largest)
            found.output_kept[name] = "itself" if outputs[name] in known else ""

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        where = inside[-1] if inside else OUTSIDE
        if not _has_storage(tensor):
            found.saved_bytes[where] += tensor.nbytes
        elif storage_of(tensor) not in known:
            known.add(storage_of(tensor))
            found.saved_bytes[where] += tensor.untyped_storage().nbytes()
        return tensor.detach()  # an output that keeps itself would never be freed

    with ExitStack() as stack:
        for piece in pieces:
            if piece.module is not None:
                stack.callback(piece.module.register_forward_pre_hook(enter(piece.name)).remove)
                stack.callback(piece.module.register_forward_hook(leave).remove)
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept))
        stack.enter_context(counter)
        stack.enter_context(_Reading(pieces, read))
        try:
            loss = step_loss(model, batch)
        except Exception as e:
            if is_out_of_memory(e) or isinstance(e, EvenerError):
                raise
            raise _raised(e, model, inside, micro_batch) from e
    check_loss(loss)
    for name, storage in outputs.items():
        if not found.output_kept[name] and storage in known:
            found.output_kept[name] = "behind"
    return found


class _Reading(TorchFunctionMode):
    """Tells whose parameter or buffer an operation reads; those of the model itself are left out."""

    def __init__(self, pieces: Sequence[Piece], tell: Callable[[str], Any]) -> None:
        super().__init__()
        held = [(t, p.name) for p in reversed(pieces) if p.name != ROOT for t in (*p.params, *p.buffers)]
        self._owner = {id(t): name for t, name in held}
        self._tell = tell

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        for value in tree_leaves((args, kwargs)):
            if id(value) in self._owner:
                self._tell(self._owner[id(value)])
        return func(*args, **(kwargs or {}))


def check_loss(loss: Any) -> None:
    """ModelError unless `loss` is one number that depends on a parameter."""
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        got = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise ModelError(f"the loss must be one number, got {got}", remedy="loss.mean() or loss.sum()")
    if not loss.requires_grad:
        raise ModelError(
            "the loss does not depend on any parameter that requires a gradient",
            remedy="a loss computed from the model's output, without detach() or no_grad()",
        )


def _raised(error: Exception, model: nn.Module, inside: list[str], micro_batch: int) -> ModelError:
    name = raised_in(error, {id(m): n for n, m in model.named_modules()}) or (inside[-1] if inside else "")
    where = f"in layer {name!r}" if name else "outside of its layers or in the loss"
    return ModelError(
        f"the model failed {where}: {last_line(error)}",
        numbers=f"micro-batch of {counted(micro_batch, 'sample')}",
        remedy=misplaced(error, "a forward pass that works on a batch of that size in a plain loop"),
    )


def _has_storage(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.numel() > 0


def _cpu_attention() -> dict[Any, Any]:
    """torch 2.13 counts no FLOPs for the CPU's attention; the formula is that of every other attention."""

    def forward(query, key, value, *args, out_shape=None, **kwargs) -> int:
        return sdpa_flop_count(query, key, value)

    return {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: forward}
