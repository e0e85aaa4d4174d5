"""BatchNorm pooled over a wave: the micro-batches with the same number in all pipelines.

device a   micro-batch 0, 3 samples ── Σx, Σx², n ──┐  one sum in forward      the statistics of 5 samples,
device b   micro-batch 0, 2 samples ── Σx, Σx², n ──┘  one more in backward    as one device would have them

    y = w (x - M) / √(V + ε) + b      M, V: mean and variance over all N values of the wave
    ∂x = w / √(V + ε) · (∂y - Σ∂y / N - x̂ Σ(∂y x̂) / N)       x̂ = (x - M) / √(V + ε), sums over the wave

Works on every kind of device over any Wire. Sums are made in host memory: a member that passes has none of
its own on a device, and one copy each way is all that the device waits for. Who is in a wave, and with which
wires, the executor knows. Every wire must belong to waves alone: gradients that travel over the same one
would be taken for statistics.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import batch_norm
from torch.nn.modules.batchnorm import _BatchNorm

from evener.core.seams import Wire
from evener.errors import ModelError

WireOf = Callable[[str], Wire | None]
Statistics = tuple[torch.Tensor, torch.Tensor, int]  # mean, biased variance, values per channel
_REPLACED = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class WaveBatchNorm(_BatchNorm):
    """BatchNorm over dimension 1 whose statistics are those of its wave; outside of one, of its own input."""

    def __init__(self, name: str, like: _BatchNorm) -> None:
        super().__init__(like.num_features, like.eps, like.momentum, affine=False, track_running_stats=False)
        self.name, self.affine, self.track_running_stats = name, like.affine, like.track_running_stats
        self._parameters.update(like._parameters)
        self._buffers.update(like._buffers)
        self.training = like.training
        self.wave: Wave | None = None

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ModelError(f"{self.name} normalises over dimension 1, its input has {input.dim()}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise (samples, channels, ...); in a wave this waits for all who are in it."""
        if not self.training or self.wave is None:
            return super().forward(input)
        self._check_input_dim(input)
        mean, variance, count = self.wave.statistics(self, input)
        wire = self.wave.wire_of(self.name)
        result: torch.Tensor = _Normalised.apply(
            input, self.weight, self.bias, mean, variance, count, self, self.wave, wire
        )
        return result

    def take_in(self, mean: torch.Tensor, variance: torch.Tensor, count: int) -> None:
        """Move the running statistics towards a wave's, by `momentum`, with the unbiased variance."""
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        part = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        with torch.no_grad():
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), part)
            unbiased = variance * (count / max(count - 1, 1))
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), part)


class Wave:
    """One micro-batch's place in its wave: a context, entered around forward and again around backward.

    What the second entry finds run again (recomputed activations) takes the statistics of the first: nothing
    is summed twice, and running statistics move once. ModelError for a layer that is called several times in
    one forward and then recomputed, as its calls may come back in another order.
    """

    def __init__(self, layers: list[WaveBatchNorm], wire_of: WireOf) -> None:
        self._layers, self.wire_of = layers, wire_of
        self._found: dict[str, Statistics] = {}
        self._calls: Counter[str] = Counter()
        self._sums: Counter[str] = Counter()  # of backward
        self._summed: dict[str, torch.Tensor] = {}
        self._backward: set[str] = set()  # layers that meet again there
        self._entries = 0

    def __enter__(self) -> "Wave":
        self._entries += 1
        for layer in self._layers:
            layer.wave = self
        return self

    def __exit__(self, *error: Any) -> None:
        for layer in self._layers:
            layer.wave = None

    def statistics(self, layer: WaveBatchNorm, x: torch.Tensor) -> Statistics:
        """(mean, biased variance, values per channel) of the wave at `layer`, summed on the first entry."""
        if self._entries > 1:
            calls = self._calls[layer.name]
            if calls != 1:
                raise ModelError(
                    f"{layer.name} is recomputed, and ran {calls} times in this micro-batch",
                    remedy="a BatchNorm of its own in each place, or no recomputation of that part",
                )
            return self._found[layer.name]
        needs_gradient = x.requires_grad or not torch.is_grad_enabled()
        sums = _own_sums(x.detach(), layer.num_features)
        sums = self._sum_forward(sums, layer.name, needs_gradient=needs_gradient, passes=False)
        found = _pooled(sums, x, layer)
        self._found[layer.name] = found
        layer.take_in(*found)
        return found

    def sum_gradients(self, sums: torch.Tensor, name: str) -> torch.Tensor:
        """[Σ∂y | Σ(∂y x̂)] over the wave; once, should a backward in two parts ask for it twice."""
        if self._calls[name] == 1 and name in self._summed:
            return self._summed[name]
        self._sums[name] += 1
        self._all_reduce(sums, name, "backward")
        self._summed[name] = sums
        return sums

    def pass_forward(self) -> None:
        """Take part with nothing in every sum of forward that is left, so that nobody waits for this device.

        For a micro-batch that is not run, or ran out of memory on the way. Each layer counts as called once,
        in the order of the model's definition.
        """
        for layer in self._layers:
            if not self._calls[layer.name]:
                nothing = _zeros(2 * layer.num_features + 1)
                self._sum_forward(nothing, layer.name, needs_gradient=False, passes=True)

    def pass_backward(self) -> None:
        """The same for the sums of backward, last layer first."""
        for layer in reversed(self._layers):
            if layer.name in self._backward and self._sums[layer.name] < self._calls[layer.name]:
                self._sums[layer.name] += 1
                self._all_reduce(_zeros(2 * layer.num_features), layer.name, "backward")

    def _sum_forward(
        self, sums: torch.Tensor, name: str, *, needs_gradient: bool, passes: bool
    ) -> torch.Tensor:
        """[Σx | Σx² | count | members that pass] over the wave, noting whether it meets again in backward.

        Who passes cannot know that by itself: a layer whose input needs no gradient has no sum there.
        """
        self._calls[name] += 1
        sums = torch.cat([sums, sums.new_tensor([passes, needs_gradient])])
        self._all_reduce(sums, name, "forward")
        if sums[-1] > 0:
            self._backward.add(name)
        return sums[:-1]

    def _all_reduce(self, sums: torch.Tensor, name: str, direction: str) -> None:
        wire = self.wire_of(name)
        if wire is not None:
            wire.all_reduce(sums, f"BatchNorm {name}, {direction}").wait()


def replace_batchnorm(model: nn.Module) -> list[str]:
    """Put a `WaveBatchNorm` in the place of every BatchNorm1d, 2d and 3d; the names of those replaced.

    Parameters, buffers and names stay the same objects. Outside of waves the model computes what it did.
    Example: Sequential(Conv2d(1, 4, 3), BatchNorm2d(4)) gives ["1"].
    """
    made: dict[int, WaveBatchNorm] = {}
    for path, parent in list(model.named_modules()):
        for key, child in list(parent.named_children()):
            if type(child) in _REPLACED:
                name = f"{path}.{key}" if path else key
                made.setdefault(id(child), WaveBatchNorm(name, child))
        for key, child in parent._modules.items():
            if id(child) in made:
                parent._modules[key] = made[id(child)]
    return [layer.name for layer in made.values()]


def wave_layers(module: nn.Module) -> list[WaveBatchNorm]:
    """The layers of `module` that take part in waves, in the order of their definition."""
    return [m for m in module.modules() if isinstance(m, WaveBatchNorm)]


def wave(layers: nn.Module | list[WaveBatchNorm], wire_of: WireOf | Wire | None) -> Wave:
    """The place of one micro-batch, run by `layers` (or a module's), in its wave.

    `wire_of(name)` is the wire between those who have this micro-batch at the layer `name`; None where nobody
    else has. A wire by itself serves all layers, None none. Example:

        place = wave(model, wire)
        with place: loss = criterion(model(x), y)
        with place: loss.backward()
    """
    held = wave_layers(layers) if isinstance(layers, nn.Module) else layers
    return Wave(held, wire_of if callable(wire_of) else lambda name: wire_of)


def hand_out_statistics(layers: list[WaveBatchNorm], wire_of: WireOf, *, leads: bool) -> None:
    """Give every holder of a layer the running statistics of the one that was in all waves (`leads`).

    Who has fewer micro-batches than others misses waves. `wire_of(name)` reaches all holders of the layer.
    Called by all together, before evaluation, saving and a change of shares.
    """
    for layer in layers:
        wire = wire_of(layer.name)
        held = [b for b in layer._buffers.values() if b is not None]
        if wire is None or not held:
            continue
        sums = torch.cat([_exactly(b.detach().reshape(-1)) for b in held]) * float(leads)
        wire.all_reduce(sums, f"BatchNorm {layer.name}, running statistics").wait()
        for buffer, part in zip(held, sums.split([b.numel() for b in held]), strict=True):
            buffer.copy_(part.view(buffer.shape))


def statistics_of(module: nn.Module) -> list[torch.Tensor]:
    """The running statistics of BatchNorm in `module`: buffers that a step moves in its forwards."""
    norms = [m for m in module.modules() if isinstance(m, _BatchNorm)]
    return [b for m in norms for b in m.buffers(recurse=False)]


@contextmanager
def keeping_statistics(module: nn.Module) -> Iterator[None]:
    """Inside, BatchNorm's running statistics in `module` do not move: for activations that are recomputed."""
    norms = [m for m in module.modules() if isinstance(m, _BatchNorm)]
    before = [dict(m._buffers) for m in norms]
    for norm in norms:
        norm._buffers.update({k: None if b is None else b.clone() for k, b in norm._buffers.items()})
    try:
        yield
    finally:
        for norm, buffers in zip(norms, before, strict=True):
            norm._buffers.update(buffers)


class _Normalised(torch.autograd.Function):
    """The forward and backward of the formulas above; the wave's mean and variance are given."""

    @staticmethod
    def forward(ctx, x, weight, bias, mean, variance, count, layer, wave, wire):
        ctx.save_for_backward(x, weight, mean, variance)
        ctx.count, ctx.name, ctx.eps, ctx.wave = count, layer.name, layer.eps, wave
        return batch_norm(x, mean, variance, weight, bias, training=False, eps=layer.eps)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        x, weight, mean, variance = ctx.saved_tensors
        dims = [d for d in range(x.dim()) if d != 1]
        shape = [-1 if d == 1 else 1 for d in range(x.dim())]
        scale = torch.rsqrt(variance + ctx.eps)
        centred = (x.to(mean.dtype) - mean.view(shape)) * scale.view(shape)
        gradient = gradient.to(mean.dtype)
        own = torch.cat([gradient.sum(dims), (gradient * centred).sum(dims)])
        of_bias, of_weight = own.chunk(2)
        of_x = None
        if ctx.needs_input_grad[0]:
            sums = ctx.wave.sum_gradients(_exactly(own), ctx.name)
            by_count = (sums / ctx.count).to(mean.device, mean.dtype).chunk(2)
            of_x = gradient - by_count[0].view(shape) - centred * by_count[1].view(shape)
            of_x = (of_x * (scale if weight is None else scale * weight).view(shape)).to(x.dtype)
        if weight is None:
            return of_x, *[None] * 8
        return of_x, of_weight.to(weight.dtype), of_bias.to(weight.dtype), *[None] * 6


def _exactly(values: torch.Tensor) -> torch.Tensor:
    """A copy in float64 in host memory, where waves are summed."""
    return values.to("cpu", torch.float64, copy=True)


def _zeros(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.float64)


def _own_sums(x: torch.Tensor, channels: int) -> torch.Tensor:
    """[Σx | Σx² | count] of each channel in float64: numbers that add up over devices.

    They are made from mean and variance, as Σx² of float32 would lose what the mean is large against.
    """
    dims = [d for d in range(x.dim()) if d != 1]
    count = x.numel() // channels
    if not count:
        return _zeros(2 * channels + 1)
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    variance, mean = _exactly(torch.stack(torch.var_mean(wide, dims, correction=0)))
    return torch.cat([mean * count, (variance + mean * mean) * count, mean.new_full((1,), count)])


def _pooled(sums: torch.Tensor, x: torch.Tensor, layer: WaveBatchNorm) -> Statistics:
    count, passes = int(sums[-2]), int(sums[-1])
    if count < 2 and not passes:  # with somebody missing the step will not count, and is no error of this one
        raise ModelError(
            f"{layer.name} has {count} value for each channel in this wave, which has no variance",
            numbers=f"input shape {tuple(x.shape)}",
            remedy="a larger micro-batch",
        )
    mean, square = (sums[:-2] / count).chunk(2)
    variance = (square - mean * mean).clamp_(min=0)
    dtype = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
    mean, variance = torch.stack([mean, variance]).to(x.device, dtype)
    return mean, variance, count
