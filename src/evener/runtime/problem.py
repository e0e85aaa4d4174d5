"""What is trained, in the runtime's words: how a batch becomes a loss and a weight."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from evener.core.words import counted
from evener.errors import ModelError, UsageError

Inputs = Callable[[Any], tuple[tuple, dict, Any]]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A model's loss on a batch.

    `inputs(batch)` gives (args, kwargs, target); the loss is `loss(model(*args, **kwargs), target)`.
    `reduction` says whether that is a mean or a sum over the batch; `weight(batch)` is what the mean divides
    by (None: samples). Then the step's gradient is Σ ∇loss_sum / Σ weight over the global batch. `metrics`
    are the names of the sums that the loss may give beside it.
    """

    loss: Callable[[Any, Any], Any]
    inputs: Inputs
    reduction: Literal["mean", "sum"] = "mean"
    weight: Callable[[Any], Any] | None = None
    metrics: tuple[str, ...] = ()

    def forward(self, model: Callable, batch: Any) -> tuple[torch.Tensor, dict]:
        """(scalar loss, metrics as {name: (sum, count)}) of `batch`."""
        args, kwargs, target = self.inputs(batch)
        return self.loss_of(model(*args, **kwargs), target)

    def loss_of(self, output: Any, target: Any) -> tuple[torch.Tensor, dict]:
        """(scalar loss, metrics) of a model's output."""
        result = self.loss(output, target)
        loss, metrics = result if isinstance(result, tuple) else (result, {})
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ModelError(
                f"the loss must be one number, got {shape}",
                remedy="return a scalar tensor, or (scalar tensor, {name: (sum, count)})",
            )
        for name, value in metrics.items():
            if name not in self.metrics or not isinstance(value, tuple) or len(value) != 2:
                raise ModelError(
                    f"the loss gives the metric {name!r} as {type(value).__name__}",
                    numbers=f"metrics announced: {', '.join(self.metrics) or 'none'}",
                    remedy="name it in the recipe's metrics=(...) and give (sum, count)",
                )
        return loss, metrics

    def weight_of(self, batch: Any, samples: int) -> float:
        """What the mean of `batch` divides by: its samples, or what the user counts."""
        return float(samples) if self.weight is None else checked_weight(self.weight(batch), samples)


def checked_weight(given: Any, samples: int) -> float:
    """What `weight=` gave for a batch as a number; UsageError unless a mean can divide by it."""
    weight = float(given)
    if not 0 <= weight < float("inf"):
        raise UsageError(
            f"weight= gives {weight:g} for a batch of {counted(samples, 'sample')}",
            remedy="what the loss's mean divides by: a number of 0 or more, 0 where nothing of it counts",
        )
    return weight


def weight_of_loss(loss: Callable, inputs: Inputs) -> Callable[[Any], Any] | None:
    """What the mean of torch's cross entropy divides by, of a batch; None for other losses: samples.

    That is the sum, over all labels but those equal to `ignore_index`, of their classes' weights, which are 1
    where there are none. Targets that are probabilities count one for each place in the batch.
    Example: CrossEntropyLoss(weight=(1, 5)) and the labels 0, 1, -100 give 6.
    """
    known = (nn.CrossEntropyLoss.forward, nn.NLLLoss.forward)
    if not isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss) or type(loss).forward not in known:
        return None  # a class of the user's may compute anything
    classes = None if loss.weight is None else loss.weight.detach().cpu().double()
    ignored = loss.ignore_index

    def weight(batch: Any) -> float:
        target = inputs(batch)[2]
        if target.is_floating_point():
            return target.numel() / target.shape[1]
        counts = target != ignored
        if classes is None:
            return int(counts.sum())
        return float(classes[target[counts].cpu()].sum())

    return weight


def default_inputs(batch: Any) -> tuple[tuple, dict, Any]:
    """(args, kwargs, target) of a batch as people write them.

    (x, y) → model(x), loss(output, y); a mapping → model(**batch), loss(output, batch); a tensor → model(x),
    loss(output, x). Anything else needs the recipe's own `inputs`.
    """
    if isinstance(batch, torch.Tensor):
        return (batch,), {}, batch
    if isinstance(batch, Mapping):
        return (), dict(batch), batch
    if isinstance(batch, Sequence) and len(batch) == 2:
        return (batch[0],), {}, batch[1]
    raise UsageError(
        f"cannot tell the model's arguments from a batch of type {type(batch).__name__}",
        numbers=f"{len(batch)} entries" if isinstance(batch, Sequence) else "",
        remedy="give the recipe inputs=lambda batch: (args, kwargs, target)",
    )


def loss_on_cpu(loss: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """`loss`, computed in host memory wherever the model's output is: its gradient goes back from there."""
    cpu = torch.device("cpu")
    return lambda output, target: loss(to_device(output, cpu), to_device(target, cpu))


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with every tensor on `device`; what goes to an accelerator is only queued where it is pinned.

    What comes to the host is there: an accelerator would go on filling it while the host reads it already.
    """
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=device.type != "cpu")
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(v, device) for v in batch))
    if isinstance(batch, list | tuple):  # before mappings, which take longer to tell
        return type(batch)([to_device(v, device) for v in batch])
    if isinstance(batch, Mapping):
        return {k: to_device(v, device) for k, v in batch.items()}
    return batch


def shapes_of(batch: Any) -> tuple:
    """The shapes of a batch's tensors: equal shapes mean equal work."""
    if isinstance(batch, torch.Tensor):
        return tuple(batch.shape)
    if isinstance(batch, list | tuple):  # before mappings, which take longer to tell
        return tuple([shapes_of(v) for v in batch])
    if isinstance(batch, Mapping):
        return tuple([shapes_of(v) for v in batch.values()])
    return ()
