"""`Pipe`: a Sequential over several devices of this process, called and trained like a module of one device.

clock        0      1      2      3          micro-batch · stage; what is below one clock can run at once
cuda:0      0·0    1·0    2·0
cuda:1             0·1    1·1    2·1         backward goes the same ways back, by autograd itself
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import wraps
from typing import Any, Concatenate, Literal, ParamSpec

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from torch.utils.checkpoint import checkpoint as recomputed

from evener.core.split import apportion, spans_of
from evener.core.words import counted
from evener.errors import ModelError, UsageError
from evener.runtime.batchnorm import keeping_statistics

Checkpoint = Literal["always", "except_last", "never"]
P = ParamSpec("P")
Devices = Sequence[str | int | torch.device]


def _balance_by_name(init: Callable[Concatenate[Any, P], None]) -> Callable[Concatenate[Any, P], None]:
    """`init`, which tells what is wrong where the balance comes second, as in another library's pipeline."""

    @wraps(init)
    def checked(self: Any, *given: P.args, **named: P.kwargs) -> None:
        if len(given) > 1 and isinstance(given[1], list | tuple):
            raise UsageError(
                f"the second argument of a Pipe is chunks, a whole number, got {given[1]!r}",
                remedy="the rest by name: ev.Pipe(module, chunks=8, devices=[...], balance=[...])",
            )
        init(self, *given, **named)

    return checked


class Pipe(nn.Sequential):
    """The layers of `module` cut into stages, one a device; a device may come more than once.

    Each batch is split along dimension 0 into up to `chunks` micro-batches, as torch.chunk splits, which run
    through the stages side by side. Input belongs on the first device; output, and so the target, is on the
    last. `balance` is the number of layers of each stage (see `auto_balance`); None takes even numbers.
    Without `devices` each layer stays where its parameters are. `checkpoint` says which micro-batches keep
    only their inputs in training and run again in backward: all, all but the last, or none. BatchNorm
    normalises each micro-batch by itself. Layers are used as they are, under the names they have in `module`.

    UsageError for another kind of module, a balance that does not fit, a tensor on two devices, an input on
    the wrong device. Example: 10 layers on devices ["cpu", "cpu"] get the balance [5, 5].
    """

    @_balance_by_name
    def __init__(
        self,
        module: nn.Sequential,
        chunks: int = 1,
        devices: Devices | None = None,
        balance: Sequence[int] | None = None,
        checkpoint: Checkpoint = "except_last",
    ) -> None:
        check_layers(module)
        _check_words(chunks, checkpoint)
        super().__init__()
        self._modules.update(module._modules)
        self.training = module.training
        if devices is None and balance is None:
            self.balance, self.devices = _as_placed(module)
        elif not devices:
            raise UsageError(
                "devices= is missing" if devices is None else "devices= names no device",
                numbers=f"balance {list(balance)}: {counted(len(balance), 'device')}" if balance else "",
                remedy="devices=['cuda:0', 'cuda:1'], one for each stage; 'cpu' several times will do",
            )
        else:
            self.devices = [device_of(d) for d in devices]
            if len(self.devices) > len(self):
                raise UsageError(
                    f"{counted(len(self), 'layer')} cannot be placed on {len(self.devices)} devices, "
                    "1 or more on each",
                    remedy=f"at most {counted(len(self), 'device')}",
                )
            self.balance = list(balance or apportion(len(self), [1.0] * len(self.devices)))
        if len(self.balance) != len(self.devices) or sum(self.balance) != len(self) or min(self.balance) < 1:
            raise UsageError(
                f"balance {self.balance} does not place {counted(len(self), 'layer')} on "
                f"{counted(len(self.devices), 'device')}",
                remedy=f"one number of layers, 1 or more, for each device; together {len(self)}",
            )
        self.chunks, self.checkpoint = chunks, checkpoint
        self._place()

    def forward(self, input: Any) -> Any:
        """The output for the whole batch, on the last device. `input` is a tensor or holds tensors."""
        stages, values = self._stages(), _split(input, self.chunks, self.devices[0])
        count = len(values)
        recompute = self.training and torch.is_grad_enabled() and self.checkpoint != "never"
        for clock in range(count + len(stages) - 1):
            for number in range(max(0, clock - count + 1), min(clock + 1, len(stages))):
                chunk = clock - number
                again = recompute and (self.checkpoint == "always" or chunk < count - 1)
                value = _to(values[chunk], self.devices[number])
                values[chunk] = _run(stages[number], value, again=again)
        return _like_a_reference(_joined(values))

    def _stages(self) -> list[nn.Sequential]:
        if len(self) != sum(self.balance):
            raise UsageError(
                f"the Pipe was cut for {counted(sum(self.balance), 'layer')} and has {len(self)} now"
            )
        layers = list(self)
        return [nn.Sequential(*layers[a:b]) for a, b in spans_of(self.balance)]

    def _place(self) -> None:
        where: dict[int, torch.device] = {}
        for stage, device in zip(self._stages(), self.devices, strict=True):
            for tensor in _tensors(stage):
                if where.setdefault(id(tensor), device) != device:
                    raise UsageError(
                        f"one tensor of shape {tuple(tensor.shape)} belongs to layers on {where[id(tensor)]} "
                        f"and on {device}",
                        remedy="a device may come twice: devices=['cuda:0', 'cuda:1', 'cuda:0'] holds the "
                        "first and the last layers together",
                    )
        for stage, device in zip(self._stages(), self.devices, strict=True):
            stage.to(device)

    def _apply(self, fn: Any, recurse: bool = True) -> "Pipe":
        super()._apply(fn, recurse)
        for stage, device in zip(self._stages(), self.devices, strict=True):
            if any(t.device != device for t in _tensors(stage)):
                self._place()
                raise UsageError(
                    "a Pipe's layers cannot be moved; they are back where they belong",
                    numbers=f"devices: {', '.join(map(str, self.devices))}",
                    remedy="a new Pipe with other devices; dtypes can be changed",
                )
        return self


def device_of(given: str | int | torch.device) -> torch.device:
    """The device with its index ("cuda" is "cuda:0"); UsageError when this process has none such."""
    try:
        return torch.empty(0, device=given).device
    except (RuntimeError, AssertionError) as e:
        raise UsageError(
            f"there is no device {given} here: {str(e).splitlines()[0]}",
            remedy="devices that `evener doctor` shows; cpu is always one, and may be named several times",
        ) from e


def check_layers(module: Any) -> None:
    """UsageError unless `module` is a Sequential whose layers can be cut apart."""
    if not isinstance(module, nn.Sequential) or type(module).forward is not nn.Sequential.forward:
        raise UsageError(
            f"a Pipe is made from an nn.Sequential, got {type(module).__name__}",
            remedy="nn.Sequential(*layers)",
        )
    if not len(module) or module._parameters or module._buffers:
        raise UsageError(
            f"a Pipe cuts between layers; this Sequential has {len(module)} and maybe tensors of its own",
            remedy="one layer or more, parameters and buffers inside of them",
        )


def _check_words(chunks: int, checkpoint: str) -> None:
    if isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1:
        raise UsageError(f"chunks must be a whole number, 1 or more, got {chunks!r}")
    if checkpoint not in ("always", "except_last", "never"):
        raise UsageError(f"checkpoint={checkpoint!r}", remedy="'always', 'except_last' or 'never'")


def _as_placed(module: nn.Sequential) -> tuple[list[int], list[torch.device]]:
    """(balance, devices) by where the layers' tensors are; a layer without any goes with those before it."""
    balance: list[int] = []
    devices: list[torch.device | None] = []
    for name, layer in module.named_children():
        found = {t.device for t in _tensors(layer)}
        if len(found) > 1:
            raise UsageError(f"layer {name} lies on {' and '.join(sorted(map(str, found)))}")
        device = found.pop() if found else devices[-1] if devices else None
        if devices and devices[-1] in (None, device):
            balance[-1] += 1
            devices[-1] = device
        else:
            balance.append(1)
            devices.append(device)
    return balance, [d or torch.device("cpu") for d in devices]


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _run(stage: nn.Module, value: Any, *, again: bool) -> Any:
    if not again:
        return stage(value)

    def run(kept: Any) -> Any:
        # What is kept to run again must survive a layer that writes to its input.
        return stage(tree_map_only(torch.Tensor, torch.clone, kept))

    return recomputed(
        run, value, use_reentrant=False, context_fn=lambda: (nullcontext(), keeping_statistics(stage))
    )


def _to(value: Any, device: torch.device) -> Any:
    # A copy to the host must be complete when it returns: the host would read it too early.
    return tree_map_only(torch.Tensor, lambda t: t.to(device, non_blocking=device.type != "cpu"), value)


def _split(batch: Any, chunks: int, device: torch.device) -> list[Any]:
    leaves, spec = tree_flatten(batch)
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    for tensor in tensors:
        if tensor.device != device:
            raise UsageError(
                f"the input is on {tensor.device}, the first layer is on {device}",
                remedy=f"input.to('{device}'); the target belongs where the output is",
            )
    sizes = {t.size(0) if t.dim() else 0 for t in tensors}
    if len(sizes) != 1 or sizes == {0}:
        raise UsageError(
            "the input cannot be split by samples",
            numbers=f"shapes {', '.join(str(tuple(t.shape)) for t in tensors) or 'of no tensor'}",
            remedy="tensors with one size of dimension 0, 1 or more: the samples",
        )
    count = len(tensors[0].chunk(chunks))
    columns = [x.chunk(chunks) if isinstance(x, torch.Tensor) else [x] * count for x in leaves]
    return [tree_unflatten([column[i] for column in columns], spec) for i in range(count)]


def _joined(values: list[Any]) -> Any:
    if len(values) == 1:
        return values[0]
    rows, spec = [tree_flatten(v)[0] for v in values], tree_flatten(values[0])[1]
    if any(isinstance(x, torch.Tensor) and not x.dim() for row in rows for x in row):
        raise ModelError(
            "the last layer gives one number for a whole micro-batch, which cannot be joined by samples",
            remedy="the loss outside of the Pipe, or an output with the samples in dimension 0",
        )
    columns = zip(*rows, strict=True)
    return tree_unflatten([torch.cat(c) if isinstance(c[0], torch.Tensor) else c[0] for c in columns], spec)


def _like_a_reference(output: Any) -> Any:
    """The output, which also answers `local_value()`: torch's own Pipe returned an RRef."""
    if not isinstance(output, torch.Tensor):
        return output
    twin = output.view_as(output)  # an output that held itself would live until the next garbage collection
    twin.local_value = lambda: output  # type: ignore[attr-defined]
    return twin
