"""What a plan names as not exact: whatever of the model depends on how a batch is split."""

from collections.abc import Callable, Iterator, Sequence

import msgspec
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from evener.core.plan import Plan
from evener.core.profile import Profile
from evener.core.words import some
from evener.runtime.batchnorm import WaveBatchNorm
from evener.runtime.dropout import unkeyed_randomness
from evener.runtime.problem import to_device
from evener.session.layout.precision import precision_parts
from evener.session.loop.stealing import stolen_parts
from evener.session.recipe import Recipe, dropout_names

_FEW = 3  # samples that show what draws random numbers
NAMED = 5  # in a sentence
POOLED = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, WaveBatchNorm)
BATCH_NORM = (
    "BatchNorm: each micro-batch is normalised by its own statistics, as with gradient accumulation on one "
    "device; running statistics are averaged over devices, weighted by samples, before evaluation and saving"
)
WAVES = (
    "BatchNorm: the micro-batches with the same number are normalised together, as one device running them "
    "merged would; each of these waves has statistics of its own, as with gradient accumulation"
)
DROPOUT = "dropout: every device draws its own masks, so results depend on the split as they do on the seed"


def with_inexact(plan: Plan, recipe: Recipe, profile: Profile | None = None) -> Plan:
    """The plan, naming everything whose result is not that of one device in float32.

    Which buffers training passes change is known from a `profile` alone.
    """
    sentences = plan.inexact + inexact_parts(recipe) + precision_parts(plan, recipe)
    sentences += moving_parts(recipe.model, profile.moving_buffers if profile else ())
    if plan.steal:
        sentences += stolen_parts(recipe)
    if plan.fewer:
        sentences += (plan.fewer.sentence(plan.global_batch),)
    return msgspec.structs.replace(plan, inexact=tuple(dict.fromkeys(sentences)))


def inexact_parts(recipe: Recipe) -> tuple[str, ...]:
    """Sentences on what the model holds whose result depends on how a batch is split.

    With dropout free of the split, the model is run once on a few samples to see what still draws.
    """
    modules = list(recipe.model.modules())
    norms = [m for m in modules if isinstance(m, _BatchNorm)]
    found = []
    if any(type(m) in POOLED for m in norms) and recipe.batch_norm == "wave":
        found.append(WAVES)
    if any(recipe.batch_norm == "local" or type(m) not in POOLED for m in norms):
        found.append(BATCH_NORM)
    if recipe.dropout == "split-free":
        found += _unkeyed(recipe)
    elif any(getattr(m, name) for m in modules for name in dropout_names(m)):
        found.append(DROPOUT)
    return (*found, *hooked_parts(recipe.model))


def moving_parts(model: nn.Module, names: Sequence[str]) -> tuple[str, ...]:
    """A sentence on what becomes of buffers, `names`, that the model's passes change themselves."""
    buffers = dict(model.named_buffers())
    means = [n for n in names if n in buffers and buffers[n].is_floating_point()]
    firsts = [n for n in names if n in buffers and n not in means]
    if not means and not firsts:
        return ()
    kept = [f"{some(means, NAMED)} as the mean over devices, weighted by samples"] if means else []
    kept += [f"{some(firsts, NAMED)} as the first device has it"] if firsts else []
    own = "; each device evaluates with its own whole numbers" if firsts else ""
    return (
        "buffers that the model changes itself: each device changes its own, in each of its micro-batches; "
        f"saved are {', '.join(kept)}{own}",
    )


def hooked_parts(model: nn.Module) -> tuple[str, ...]:
    """A sentence on the user's hooks that meet gradients: of parameters and of modules."""
    owners = [*model.named_parameters(), *model.named_modules()]
    names = [name or "the model itself" for name, owner in owners if any(map(_of_the_user, _hooks(owner)))]
    if not names:
        return ()
    return (
        f"hooks on gradients ({some(names, NAMED)}): each meets the gradient of one micro-batch at a time, "
        "on every device; exact where it is linear (g * 2), not where it is not (g.clamp(-1, 1))",
    )


def _hooks(owner: nn.Module | torch.Tensor) -> Iterator[Callable]:
    for kind in ("_backward_hooks", "_backward_pre_hooks", "_post_accumulate_grad_hooks"):
        yield from (getattr(owner, kind, None) or {}).values()


def _of_the_user(hook: Callable) -> bool:
    return not str(getattr(hook, "__module__", type(hook).__module__)).startswith("evener.")


def _unkeyed(recipe: Recipe) -> list[str]:
    from evener.runtime.cutting.observing import untouched  # loads torch.export, which is slow

    model = recipe.model
    where = next((p.device for p in model.parameters()), torch.device("cpu"))
    args, kwargs, _ = recipe.problem.inputs(to_device(recipe.batch_of(_FEW), where))
    with untouched(model):
        model.train()
        return unkeyed_randomness(model, lambda: model(*args, **kwargs))
