"""A call of the model as a flat tuple of tensors: what enters the first stage."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from evener.errors import ModelError

Example = tuple[tuple, dict]


@dataclass(frozen=True, kw_only=True)
class Call:
    """How the model was called in the example: structure, constants and sizes.

    `constants` maps leaf number → value of what is no tensor; `sizes` has the example's shape of each tensor,
    `free` the (tensor, dimension) pairs whose size may change; all others must stay as they were.
    """

    spec: TreeSpec
    constants: dict[int, Any]
    added: dict[str, Any]
    sizes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    names: tuple[str, ...]
    free: frozenset[tuple[int, int]] = field(default=frozenset())

    def flatten(self, args: Sequence, kwargs: dict) -> tuple[Tensor, ...]:
        """The tensors of one micro-batch, in the order of the call.

        ModelError where the call differs from the example in structure, in a constant, or in a size that the
        cut has fixed.
        """
        is_plain = self._is_plain and not kwargs and len(args) == len(self.sizes)
        if is_plain and all(isinstance(a, Tensor) for a in args):
            self._check_sizes(args)
            return tuple(args)
        leaves, spec = tree_flatten((tuple(args), {**self.added, **kwargs}))
        if spec != self.spec:
            raise ModelError(
                "the model is called in another way than in the example it was cut with",
                numbers=f"example {_show(self.spec)}, now {_show(spec)}",
                remedy="cut again with an example that is called this way",
            )
        tensors: list[Tensor] = []
        for number, leaf in enumerate(leaves):
            if number in self.constants:
                self._check_constant(number, leaf)
            elif not isinstance(leaf, Tensor):
                raise ModelError(
                    f"argument {self.names[len(tensors)]} was a tensor in the example and is {leaf!r} now"
                )
            else:
                tensors.append(leaf)
        self._check_sizes(tensors)
        return tuple(tensors)

    @cached_property
    def _is_plain(self) -> bool:
        """Whether the example was tensors and nothing else: the walk through a tree costs 30 µs a call."""
        return self.spec == tree_flatten(((None,) * len(self.sizes), {}))[1] and not self.constants

    @cached_property
    def _fixed(self) -> tuple[tuple[int, ...], ...]:
        """By tensor the dimensions whose size may not change."""
        return tuple(
            tuple(d for d in range(len(sizes)) if (number, d) not in self.free)
            for number, sizes in enumerate(self.sizes)
        )

    def unflatten(self, tensors: Sequence[Any]) -> Example:
        """(args, kwargs) with `tensors` in their places."""
        rest = iter(tensors)
        leaves = [
            self.constants[i] if i in self.constants else next(rest) for i in range(self.spec.num_leaves)
        ]
        return tree_unflatten(leaves, self.spec)

    def _check_constant(self, number: int, leaf: Any) -> None:
        known = self.constants[number]
        if leaf is not known and (isinstance(leaf, Tensor) or leaf != known):
            raise ModelError(
                f"a constant argument was {known!r} when the model was cut and is {_short(leaf)} now",
                remedy="cut again with that value, or pass it as a tensor",
            )

    def _check_sizes(self, tensors: Sequence[Tensor]) -> None:
        for number, (tensor, sizes) in enumerate(zip(tensors, self.sizes, strict=True)):
            shape, fixed = tensor.shape, self._fixed[number]
            if len(shape) != len(sizes) or any(shape[d] != sizes[d] for d in fixed):
                raise ModelError(
                    f"argument {self.names[number]} has a size that the cut does not allow",
                    numbers=f"cut with {sizes}, dimensions {list(fixed)} fixed, now {tuple(shape)}",
                    remedy="cut again with an example of that size",
                )


def call_of(model: nn.Module, example: Example) -> tuple[Call, tuple[Tensor, ...], list[str]]:
    """(the call of `example`, its tensors, sentences about what was added to it)."""
    args, kwargs = example
    added, notes = _without_cache(model, args, kwargs)
    leaves, spec = tree_flatten((tuple(args), {**added, **kwargs}))
    tensors = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
    if not tensors:
        raise ModelError("the example holds no tensor", remedy="example=((x,), {}) with one micro-batch x")
    if any(t.dim() and t.shape[0] == 0 for t in tensors):
        raise ModelError("the example holds a tensor without samples", remedy="one sample or more")
    paths = torch.utils._pytree.tree_flatten_with_path((tuple(args), {**added, **kwargs}))[0]
    names = tuple(_name(path) for path, leaf in paths if isinstance(leaf, Tensor))
    call = Call(
        spec=spec,
        constants={i: leaf for i, leaf in enumerate(leaves) if not isinstance(leaf, Tensor)},
        added=added,
        sizes=tuple(tuple(t.shape) for t in tensors),
        dtypes=tuple(t.dtype for t in tensors),
        names=names,
    )
    return call, tensors, notes


def _without_cache(model: nn.Module, args: Sequence, kwargs: dict) -> tuple[dict[str, Any], list[str]]:
    """Hugging Face models make a cache for generation by default; it is no tensor and of no use here."""
    wanted = getattr(getattr(model, "config", None), "use_cache", False)
    parameters = inspect.signature(model.forward).parameters
    if not wanted or "use_cache" in kwargs or "use_cache" not in list(parameters)[len(args) :]:
        return {}, []
    return {"use_cache": False}, ["called with use_cache=False: a cache is for generation and crosses no cut"]


def _name(path: tuple) -> str:
    """args[0] or kwargs['mask']. The first key says which of the two, the rest where in it."""
    where = "args" if path[0].idx == 0 else "kwargs"
    return where + torch.utils._pytree.keystr(path[1:])


def _show(spec: TreeSpec) -> str:
    args, kwargs = tree_unflatten(["·"] * spec.num_leaves, spec)
    return f"args {args}, kwargs {kwargs}".replace("'", "")


def _short(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
