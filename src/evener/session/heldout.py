"""Loss and metrics on held-out samples, computed by all devices through the plan they train with."""

from dataclasses import dataclass

from evener.core.order import positions
from evener.core.seams import Wire
from evener.session.steps import Steps


@dataclass(frozen=True, kw_only=True)
class Heldout:
    """Mean loss over the held-out samples, and the mean of each metric that the loss gives beside it."""

    loss: float
    metrics: dict[str, float]


def evaluate_heldout(steps: Steps, wire: Wire) -> Heldout:
    """Loss over the recipe's held-out dataset: Σ loss / Σ weight over all devices; metrics Σ sum / Σ count.

    The model is in evaluation mode while this runs; floating buffers are averaged over devices first, each
    weighted by its samples, so that every device evaluates one and the same model.
    """
    recipe, playbook, size = steps.recipe, steps.playbook, len(steps.recipe.heldout)
    steps.average_buffers(wire)
    routes, row = playbook.forwards(size)

    def fetch(stage: int, micro_batch: int):
        chosen = range(*positions(routes, stage, playbook.here, micro_batch))
        return recipe.collate_fn([recipe.heldout[i] for i in chosen])

    totals = steps.executor.evaluate(row, routes, fetch, size)
    means = {name: total / count for name, (total, count) in totals.metrics.items() if count}
    return Heldout(loss=totals.loss, metrics=means)
