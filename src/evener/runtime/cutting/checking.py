"""The proof of a cut: its stages, run one after another, against the uncut model, on the example.

Outputs and gradients are compared at the example's size, outputs at a doubled micro-batch and at other
lengths. A size at which the model itself works and the stages agree may change; all others are fixed.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from evener.errors import ModelError
from evener.runtime.cutting.call import Call
from evener.runtime.cutting.observing import untouched
from evener.runtime.cutting.program import TraceError
from evener.runtime.cutting.stage import StageModule

SEED = 20240229
Tensors = tuple[Tensor, ...]
Named = dict[str, Any]


class Checker:
    """Runs a model and its stages on the same tensors with the same random numbers."""

    def __init__(
        self,
        model: nn.Module,
        call: Call,
        stages: Sequence[StageModule],
        unflatten: Callable[[Tensors], Any],
    ) -> None:
        self._model, self._call, self._stages, self._unflatten = model, call, stages, unflatten
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._names, self._parameters = list(trained), list(trained.values())

    def check(self, tensors: Tensors, *, training: bool) -> None:
        """TraceError where outputs, gradients or buffers on `tensors` are not the model's."""
        try:
            wanted, wanted_gradients, wanted_buffers = self._whole(tensors, training=training, backward=True)
        except Exception as error:
            raise ModelError(
                f"the uncut model raised on the example: {type(error).__name__}: {error}",
                remedy="a model that runs forward and backward on one device",
            ) from error
        try:
            found, found_gradients, found_buffers = self._chained(tensors, training=training, backward=True)
        except Exception as error:  # whatever a step raises that had its values from another stage
            raise TraceError(f"the stages raised {type(error).__name__}: {error}") from error
        _compare("output", wanted, found)
        _compare("gradient", wanted_gradients, found_gradients)
        _compare("buffer", wanted_buffers, {n: found_buffers[n] for n in wanted_buffers})

    def accepts(self, tensors: Tensors) -> bool:
        """Whether the model itself can be called with `tensors`."""
        try:
            self._whole(tensors, training=True, backward=False)
        except Exception:  # whatever a model raises for sizes that it was not made for
            return False
        return True

    def agrees(self, tensors: Tensors) -> bool:
        """Whether the stages give the model's output on `tensors`."""
        try:
            wanted = self._whole(tensors, training=True, backward=False)[0]
            _compare("output", wanted, self._chained(tensors, training=True, backward=False)[0])
        except Exception:  # as above
            return False
        return True

    def _whole(self, tensors: Tensors, *, training: bool, backward: bool) -> tuple[Named, Named, Named]:
        """(outputs, gradients, buffers after the forward), each by name."""
        with untouched(self._model):
            self._start(training=training)
            args, kwargs = self._call.unflatten(tuple(t.detach().clone() for t in tensors))
            outputs = _tensors(self._model(*args, **kwargs))
            found = _copies(enumerate(outputs))
            gradients = _gradients(outputs, self._parameters) if backward else []
            return found, self._by_name(gradients), _copies(self._model.named_buffers())

    def _chained(self, tensors: Tensors, *, training: bool, backward: bool) -> tuple[Named, Named, Named]:
        """The same, stage by stage, each with leaves of its own, as on devices of their own."""
        with untouched(self._model):
            self._start(training=training)
            given: list[Tensors] = []
            gave: list[Tensors] = []
            carry = tuple(t.detach().clone() for t in tensors)
            for stage in self._stages:
                given.append(carry)
                gave.append(stage(carry))
                carry = tuple(_leaf(t) for t in gave[-1])
            outputs = _tensors(self._unflatten(gave[-1]))
            found = _copies(enumerate(outputs))
            gradients = self._backward(given, gave, outputs) if backward else []
            buffers = _copies((n, t) for stage in self._stages for n, t in stage.named.items())
            return found, self._by_name(gradients), buffers

    def _by_name(self, gradients: list) -> Named:
        return dict(zip(self._names, gradients, strict=True)) if gradients else {}

    def _start(self, *, training: bool) -> None:
        self._model.train(training)
        for stage in self._stages:
            stage.training = training  # its layers are the model's own
        torch.manual_seed(SEED)

    def _backward(self, given: list[Tensors], gave: list[Tensors], outputs: list[Tensor]) -> list:
        sums: list[Tensor | None] = [None] * len(self._parameters)
        heads, weights = _heads(outputs)
        for inputs, values in zip(reversed(given), [outputs, *reversed(gave[:-1])], strict=True):
            if values is not outputs:
                pairs = [
                    (v, g) for v, g in zip(values, weights, strict=True) if g is not None and v.requires_grad
                ]
                heads, weights = [v for v, _ in pairs], [g for _, g in pairs]
            wanted = [t for t in inputs if t.requires_grad]
            found = _grad(heads, [*wanted, *self._parameters], weights)
            for i, gradient in enumerate(found[len(wanted) :]):
                if gradient is not None:
                    before = sums[i]
                    sums[i] = gradient if before is None else before + gradient
            rest = iter(found[: len(wanted)])
            weights = [next(rest) if t.requires_grad else None for t in inputs]
        return sums


def _leaf(tensor: Tensor) -> Tensor:
    copy = tensor.detach().clone(memory_format=torch.contiguous_format)
    return copy.requires_grad_(tensor.requires_grad)


def _tensors(output: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]


def _copies(tensors: Iterable[tuple[Any, Tensor]]) -> Named:
    return {str(name): t.detach().clone() for name, t in tensors}


def _heads(outputs: list[Tensor]) -> tuple[list[Tensor], list]:
    """Outputs with a gradient, and a fixed random weight for each entry: their sum is the loss."""
    heads = [t for t in outputs if t.requires_grad]
    random = torch.Generator().manual_seed(SEED)
    drawn = [torch.randn(t.shape, generator=random, dtype=torch.float64) for t in heads]
    return heads, [w.to(t.device, t.dtype) for w, t in zip(drawn, heads, strict=True)]


def _gradients(outputs: list[Tensor], parameters: list[nn.Parameter]) -> list:
    heads, weights = _heads(outputs)
    return _grad(heads, list(parameters), weights)


def _grad(heads: list[Tensor], inputs: list, weights: list) -> list:
    if not heads or not inputs:
        return [None] * len(inputs)
    return list(torch.autograd.grad(heads, inputs, weights, allow_unused=True))


def _compare(what: str, wanted: Named, found: Named) -> None:
    if wanted.keys() != found.keys():
        raise TraceError(f"the stages give {len(found)} of {what}, the model {len(wanted)}")
    for name, a in wanted.items():
        b = found[name]
        if a is None and b is None:
            continue
        a = torch.zeros_like(b) if a is None else a.to_dense()
        b = torch.zeros_like(a) if b is None else b.to_dense()
        if a.shape != b.shape or a.dtype != b.dtype:
            raise TraceError(f"{what} {name}: {tuple(b.shape)} {b.dtype} for {tuple(a.shape)} {a.dtype}")
        if not a.is_meta and not _close(a, b):
            away = (a.to(torch.complex128) - b.to(torch.complex128)).abs().max().item()
            raise TraceError(f"{what} {name} of the stages is not the model's: {away:.1e} away")


def _close(a: Tensor, b: Tensor) -> bool:
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    room = 1e3 * torch.finfo(a.dtype).eps
    largest = a.abs().nan_to_num(posinf=0).max().item() if a.numel() else 0.0
    return torch.allclose(a, b, rtol=room, atol=room * largest, equal_nan=True)


def double(tensors: Tensors) -> tuple[Tensors, frozenset[tuple[int, int]]]:
    """`tensors` with twice the samples, and which (tensor, dimension) pairs that changed."""
    batch = next((t.shape[0] for t in tensors if t.dim()), 0)
    samples = [t.dim() > 0 and t.shape[0] == batch for t in tensors]
    doubled = tuple(torch.cat([t, t]) if s else t for t, s in zip(tensors, samples, strict=True))
    return doubled, frozenset((i, 0) for i, s in enumerate(samples) if s)


def shorter(tensors: Tensors) -> Iterator[tuple[frozenset[tuple[int, int]], list[Tensors]]]:
    """For each size beside the samples': where it stands, and `tensors` with half of it and with one less."""
    where: dict[int, set[tuple[int, int]]] = {}
    for i, tensor in enumerate(tensors):
        for d in range(1, tensor.dim()):
            where.setdefault(tensor.shape[d], set()).add((i, d))
    for size, places in where.items():
        lengths = [n for n in dict.fromkeys((size // 2, size - 1)) if 0 < n < size]
        yield frozenset(places), [_narrowed(tensors, places, n) for n in lengths]


def _narrowed(tensors: Tensors, places: set[tuple[int, int]], length: int) -> Tensors:
    found = list(tensors)
    for i, d in sorted(places):
        found[i] = found[i].narrow(d, 0, length)
    return tuple(found)
