"""Loss and metrics on held-out samples, computed by all devices through the plan they train with."""

from dataclasses import dataclass

from evener.core.order import positions
from evener.core.seams import Wire
from evener.runtime.agreement import judge
from evener.runtime.tally import Totals
from evener.session.steps import Steps


@dataclass(frozen=True, kw_only=True)
class Heldout:
    """Mean loss over the held-out samples, and the mean of each metric that the loss gives beside it."""

    loss: float
    metrics: dict[str, float]


def evaluate_heldout(steps: Steps, wire: Wire) -> Heldout | None:
    """Loss over the recipe's held-out dataset: Σ loss / Σ weight over all devices; metrics Σ sum / Σ count.

    None where that is no number (NaN on a device, out of memory, no weight): `steps.decisions` then says why,
    and the run goes on, as what it has learnt is worth keeping.

    The model is in evaluation mode while this runs; floating buffers are averaged over devices first, each
    weighted by its samples, so that every device evaluates one and the same model.
    """
    recipe, playbook, size = steps.recipe, steps.playbook, len(steps.recipe.heldout)
    steps.average_buffers(wire)
    routes, row = playbook.forwards(size)

    def read(stage: int, micro_batch: int):
        chosen = range(*positions(routes, stage, playbook.here, micro_batch))
        return recipe.collate_fn([recipe.heldout[i] for i in chosen])

    fetch = steps.layout.tables.held_out(read, playbook.held_out_reads(size))
    totals = steps.executor.evaluate(row, routes, fetch, size)
    why_not = _why_not(totals)
    if why_not:
        steps.decisions.append(f"no held-out loss after {steps.samples_seen} samples: {why_not}")
        return None
    means = {name: total / count for name, (total, count) in totals.metrics.items() if count}
    return Heldout(loss=totals.loss, metrics=means)


def _why_not(totals: Totals) -> str:
    verdict = judge(totals.health, on_non_finite="skip")
    if verdict.do != "apply":
        return verdict.reason
    return "" if totals.weight else "none of the held-out samples counts, their weight is 0"
