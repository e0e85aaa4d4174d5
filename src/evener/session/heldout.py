"""The loss on held-out samples, computed by all devices through the plan they train with."""

from evener.core.order import positions
from evener.core.seams import Wire
from evener.session.steps import Steps


def heldout_loss(steps: Steps, wire: Wire) -> float:
    """Mean loss over the recipe's held-out dataset, Σ loss / Σ weight over all devices.

    The model is in evaluation mode while this runs; floating buffers are averaged over devices first, each
    weighted by its samples, so that every device evaluates one and the same model.
    """
    recipe, playbook, size = steps.recipe, steps.playbook, len(steps.recipe.heldout)
    steps.average_buffers(wire)
    routes = playbook.routes(size)

    def fetch(stage: int, micro_batch: int):
        chosen = range(*positions(routes, stage, playbook.here, micro_batch))
        return recipe.collate_fn([recipe.heldout[i] for i in chosen])

    return steps.executor.evaluate(playbook.row(size), routes, fetch, size).loss
