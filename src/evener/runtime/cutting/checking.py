"""The proof of a cut: its stages, run one after another, against the uncut model, on the example.

Outputs and gradients are compared at the example's size, outputs at a doubled micro-batch and at other
lengths. A size at which the model itself works and the stages agree may change; all others are fixed.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from evener.runtime.cutting.call import Call
from evener.runtime.cutting.observing import untouched
from evener.runtime.cutting.program import TraceError

SEED = 20240229
Forward = Callable[[tuple[Tensor, ...]], list[Tensor]]
Tensors = tuple[Tensor, ...]


class Checker:
    """Runs a model and its stages on the same tensors with the same random numbers."""

    def __init__(
        self,
        model: nn.Module,
        call: Call,
        stages: Sequence[nn.Module],
        unflatten: Callable[[Tensors], object],
    ) -> None:
        self._model, self._call, self._stages, self._unflatten = model, call, stages, unflatten
        self._parameters = [p for p in model.parameters() if p.requires_grad]

    def check(self, tensors: Tensors, *, training: bool) -> None:
        """TraceError where outputs or gradients on `tensors` are not the model's."""
        wanted, wanted_gradients = self._whole(tensors, training=training, backward=True)
        found, found_gradients = self._chained(tensors, training=training, backward=True)
        _compare("outputs", wanted, found)
        _compare("gradients", wanted_gradients, found_gradients)

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
            wanted, _ = self._whole(tensors, training=True, backward=False)
            found, _ = self._chained(tensors, training=True, backward=False)
            _compare("outputs", wanted, found)
        except Exception:  # as above
            return False
        return True

    def _whole(self, tensors: Tensors, *, training: bool, backward: bool) -> tuple[list[Tensor], list]:
        with untouched(self._model):
            self._start(training=training)
            args, kwargs = self._call.unflatten(tuple(t.detach().clone() for t in tensors))
            outputs = _tensors(self._model(*args, **kwargs))
            return _detached(outputs), _gradients(outputs, self._parameters) if backward else []

    def _chained(self, tensors: Tensors, *, training: bool, backward: bool) -> tuple[list[Tensor], list]:
        """Stage by stage, each with leaves of its own, as on devices of their own."""
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
            detached = _detached(outputs)
            gradients = self._backward(given, gave, outputs) if backward else []
        return detached, gradients

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


def _detached(outputs: list[Tensor]) -> list[Tensor]:
    return [t.detach().clone() for t in outputs]


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


def _compare(what: str, wanted: Sequence, found: Sequence) -> None:
    if len(wanted) != len(found):
        raise TraceError(f"the stages give {len(found)} {what}, the model {len(wanted)}")
    for number, (a, b) in enumerate(zip(wanted, found, strict=True)):
        a = torch.zeros_like(b) if a is None and b is not None else a
        b = torch.zeros_like(a) if b is None and a is not None else b
        if a is None:
            continue
        a, b = a.to_dense() if a.is_sparse else a, b.to_dense() if b.is_sparse else b
        if a.shape != b.shape or a.dtype != b.dtype:
            raise TraceError(f"{what} {number}: {tuple(b.shape)} {b.dtype} for {tuple(a.shape)} {a.dtype}")
        if not a.is_meta and not _close(a, b):
            away = (a.double() - b.double()).abs().max().item() if not a.is_complex() else float("nan")
            raise TraceError(f"{what} {number} of the stages are not the model's: {away:.1e} away")


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
