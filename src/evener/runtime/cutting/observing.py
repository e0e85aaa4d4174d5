"""A program run on the example, step by step: what the values are, what is written in place or drawn."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from evener.runtime.cutting.program import RANDOM_WORDS, Program, is_number


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What one step gave: `kind` is tensor, number or the type's name; `shape` of a number is itself."""

    kind: str
    shape: tuple[int, ...] = ()
    num_bytes: int = 0
    dtype: torch.dtype | None = None
    needs_gradient: bool = False
    memory: frozenset[int] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Facts:
    """`seen` by step; `writes` has the memory that a step writes in place, `random` the steps that draw.

    `mutated` names the buffers that the forward writes to.
    """

    seen: dict[fx.Node, Seen]
    writes: dict[fx.Node, frozenset[int]]
    random: frozenset[fx.Node]
    mutated: frozenset[str]


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Leaves parameters' gradients, buffers, modes and random numbers as they were."""
    modes = [(m, m.training) for m in model.modules()]
    buffers = [(m, k, b, b.clone()) for m in model.modules() for k, b in m._buffers.items() if b is not None]
    devices = sorted({t.device.index for t in model.parameters() if t.device.type not in ("cpu", "meta")})
    kind = next((t.device.type for t in model.parameters() if t.device.type not in ("cpu", "meta")), "cuda")
    try:
        with torch.random.fork_rng(devices=devices, device_type=kind), torch.enable_grad():
            yield
    finally:
        with torch.no_grad():
            for module, key, buffer, copy in buffers:
                module._buffers[key] = buffer
                buffer.copy_(copy)
        for module, mode in modes:
            module.training = mode


def observe(program: Program, model: nn.Module, tensors: tuple[Tensor, ...]) -> Facts:
    """Run `program` on `tensors` and note what its steps do. Call it within `untouched`."""
    observer = _Observer(program, model)
    observer.run(*tensors)
    copies = observer.copies
    mutated = {n for n, b in model.named_buffers() if b is not copies[n][0] or _differ(b, copies[n][1])}
    return Facts(
        seen=observer.seen,
        writes=observer.writes,
        random=frozenset(observer.random),
        mutated=frozenset(mutated),
    )


class _Observer(fx.Interpreter):
    def __init__(self, program: Program, model: nn.Module) -> None:
        super().__init__(model, garbage_collect_values=False, graph=program.graph)
        self._program, self._model = program, model
        self.seen: dict[fx.Node, Seen] = {}
        self.writes: dict[fx.Node, frozenset[int]] = {}
        self.random: set[fx.Node] = set()
        self.copies = {name: (b, b.clone()) for name, b in model.named_buffers()}

    def fetch_attr(self, target: str) -> Any:
        return self._program.attribute(self._model, target)

    def run_node(self, n: fx.Node) -> Any:
        given = [v for a in n.all_input_nodes for v in tree_leaves(self.env[a]) if isinstance(v, Tensor)]
        versions = [t._version for t in given]
        state = torch.get_rng_state()
        value = super().run_node(n)
        written = [t for t, v in zip(given, versions, strict=True) if t._version != v]
        if written:
            self.writes[n] = frozenset(_memory(t) for t in written)
        words = str(n.target).lower()
        if not torch.equal(state, torch.get_rng_state()) or any(w in words for w in RANDOM_WORDS):
            self.random.add(n)
        self.seen[n] = _describe(n, value)
        return value


def _describe(node: fx.Node, value: Any) -> Seen:
    if isinstance(value, Tensor):
        memory = frozenset({_memory(value)}) if value.numel() else frozenset()
        return Seen(
            kind="tensor",
            shape=tuple(value.shape),
            num_bytes=value.numel() * value.element_size(),
            dtype=value.dtype,
            needs_gradient=value.requires_grad,
            memory=memory,
        )
    if is_number(node):
        return Seen(kind="number", shape=(value,))
    return Seen(kind=type(value).__name__)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _differ(now: Tensor, before: Tensor) -> bool:
    """By value, as BatchNorm's kernels do not count their writes in the version."""
    return not now.is_meta and not torch.equal(now.nan_to_num(), before.nan_to_num())
