"""Whether a recipe's loss adds up over parts of a batch, which is what makes any split of it exact.

loss(8 samples) × what it divides by  =  the same of 3 of them + the same of the other 5
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from evener.core.profile import Profile
from evener.core.tracebacks import last_line
from evener.errors import ModelError
from evener.profiling.unchanged import left_unchanged
from evener.runtime.problem import Problem, to_device
from evener.runtime.tables.layer import table_layers
from evener.session.recipe import Recipe

MOST_SAMPLES = 8  # at once
CUTS = (3, 1, 4)
"""Of so many samples, one set of them for each: parts of one set may make the whole by chance."""
TOLERANCE = 1e-3  # of the loss: convolutions on some cards round to ten bits
UNSEEN = "whether the loss adds up over parts of a batch was not looked at"
_ACCEPT = (
    "where each micro-batch is to have a mean of its own all the same, as in gradient accumulation: weight= "
    "with the number of samples, weight=lambda batch: len(batch[0])"
)


@dataclass(frozen=True)
class _Ran:
    """A batch, run: its loss, what a mean of that divides by, and the model's output."""

    samples: int
    loss: float
    scale: float
    output: Any

    @property
    def loss_sum(self) -> float:
        return self.loss * self.scale if self.scale else 0.0


def check_adds_up(recipe: Recipe, device: torch.device) -> str:
    """Run a few samples of the dataset at once and in two parts, in evaluation mode, and compare the losses.

    Three sets of them, so a loss that is off for few samples, or by chance for none of these, is not found:
    `evener verify` compares whole batches.

    The model is on `device` and is left as it was. Returns a sentence where a set could not be compared, else
    "". A recipe with its own `weight` is not looked at: that is the user's word. Raises ModelError where the
    parts do not make the whole: then the result would depend on how a batch is split.
    Example: a mean over the valid labels of each batch, without weight=, is refused; also where a part has
    none, whose mean is NaN.
    """
    size = len(recipe.dataset)
    samples = min(MOST_SAMPLES, recipe.global_batch, size)
    if recipe.weight is not None or samples < 2:
        return ""
    if table_layers(recipe.model):
        return f"{UNSEEN}: tables are placed elsewhere"
    rounding = max((torch.finfo(p.dtype).eps for p in recipe.model.parameters()), default=0.0)
    if rounding > TOLERANCE / 100:
        return f"{UNSEEN}: the model is in a lower precision than float32"
    unseen = []
    for number, cut in enumerate(CUTS):
        spread = len(CUTS) * samples
        indices = [(len(CUTS) * i + number) * size // spread for i in range(samples)]
        at = max(1, samples * cut // MOST_SAMPLES)
        try:
            with left_unchanged(recipe.model, device), _evaluating(recipe.model), torch.no_grad():
                parts = [_run(recipe, device, part) for part in (indices[:at], indices[at:])]
                whole, again = _run(recipe, device, indices), _run(recipe, device, indices)
        except Exception as e:
            unseen.append(last_line(e).replace("; ", ", "))  # notes are told apart by that
            continue
        if why := _unsteady(whole.loss_sum, again.loss_sum):
            unseen.append(why)
            continue
        # A part without a valid label has a mean of 0 / 0. Losses of either sign may nearly cancel: what is
        # left of them is rounding, so parts count as well.
        sums = [part.loss_sum for part in parts]
        if not all(map(math.isfinite, sums)) or not _close(whole.loss_sum, sum(sums), *sums):
            raise _refused(recipe.problem, whole, parts)
    if not unseen:
        return ""
    return f"{UNSEEN} in {len(unseen)} of {len(CUTS)} tries: {', '.join(dict.fromkeys(unseen))}"


def _unsteady(loss: float, again: float) -> str:
    """Why nothing can be compared with the loss of the same samples run twice, or ""."""
    if not (math.isfinite(loss) and math.isfinite(again)):
        return "it is no finite number"
    return "" if _close(loss, again) else "it is another one each time"


def unseen_in(profile: Profile) -> list[str]:
    """The sentences of a profile on what was not compared, for the notes of the run that measured it."""
    return [said for said in profile.note.split("; ") if said.startswith(UNSEEN)]


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Without dropout, and with BatchNorm's running statistics: what is left of mixing is the model's own."""
    training = [m for m in model.modules() if m.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _run(recipe: Recipe, device: torch.device, indices: Sequence[int]) -> _Ran:
    problem, batch = recipe.problem, recipe.collate_fn([recipe.dataset[i] for i in indices])
    weight = problem.weight_of(batch, len(indices))
    args, kwargs, target = problem.inputs(to_device(batch, device))
    output = recipe.model(*args, **kwargs)
    loss, _ = problem.loss_of(output, target)
    return _Ran(len(indices), float(loss), weight if problem.reduction == "mean" else 1.0, output)


def _close(a: float, b: float, *beside: float) -> bool:
    return abs(a - b) <= TOLERANCE * max(map(abs, (a, b, *beside)))


def _refused(problem: Problem, whole: _Ran, parts: Sequence[_Ran]) -> ModelError:
    losses, sizes = " and ".join(f"{p.loss:.6g}" for p in parts), " and ".join(str(p.samples) for p in parts)
    numbers = f"{whole.samples} samples at once: {whole.loss:.6g}; {sizes} of them: {losses}"
    if _close(whole.loss, sum(p.loss for p in parts)) and problem.reduction == "mean":
        return ModelError(
            "the loss is a sum over samples, and is taken for a mean",
            numbers=numbers,
            remedy='reduction="sum", or a loss that is a mean',
        )
    if _mixes(whole.output, parts[0].output, parts[0].samples):
        return ModelError(
            "the model mixes the samples of a batch: the result depends on how batches are split",
            numbers=numbers,
            remedy=f"a model whose output for a sample does not depend on the others; {_ACCEPT}",
        )
    return ModelError(
        "the loss is no mean over samples: the gradient would depend on how batches are split",
        numbers=numbers,
        remedy="weight= with what its mean divides by: valid labels, weight=lambda batch: (batch[1] != "
        "-100).sum(), or the sum of their classes' weights; a loss that compares the samples of a batch with "
        f"each other has no such number; {_ACCEPT}",
    )


def _mixes(whole: Any, part: Any, samples: int) -> bool:
    """Whether the outputs for the first samples differ once others are beside them; no if that is unknown."""
    if not (isinstance(whole, Tensor) and isinstance(part, Tensor) and whole.shape[1:] == part.shape[1:]):
        return False
    off = (whole[:samples] - part).abs().max()
    return bool(off > TOLERANCE * part.abs().max())
