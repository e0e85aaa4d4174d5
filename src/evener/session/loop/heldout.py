"""Loss and metrics on held-out samples, computed by all devices through the plan they train with."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from evener.core.order import positions
from evener.core.routes import Routes
from evener.core.seams import Wire
from evener.core.words import counted
from evener.runtime.agreement import judge
from evener.runtime.tally import Totals
from evener.session.loop.steps import Steps


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
    weighted by its samples, so that these are the same everywhere.
    """
    steps.average_buffers(wire)
    held, why_not = mean_of(list(pass_over(steps, steps.recipe.heldout)))
    if held is None:
        steps.decisions.append(f"no held-out loss after {counted(steps.samples_seen, 'sample')}: {why_not}")
    return held


def pass_over(
    steps: Steps, dataset: Any, expect: Callable[[list[tuple[int, int]]], None] = lambda ranges: None
) -> Iterator[Totals]:
    """Forwards over `dataset`, a global batch at a time so that no device runs far ahead of the next.

    `expect(ranges)` is told, before each, which samples this device's last stages are about to give.
    """
    playbook, plan = steps.playbook, steps.plan
    for start in range(0, len(dataset), plan.global_batch):
        size = min(plan.global_batch, len(dataset) - start)
        routes, row = playbook.forwards(size)

        def range_of(stage: int, micro_batch: int, start: int = start, routes: Routes = routes):
            first, last = positions(routes, stage, playbook.here, micro_batch)
            return start + first, start + last

        def read(stage: int, micro_batch: int, range_of: Callable = range_of) -> Any:
            return steps.recipe.collate_fn([dataset[i] for i in range(*range_of(stage, micro_batch))])

        own = playbook.held_out_reads(size)
        expect([range_of(s, m) for s, m in own if routes.stages[s].is_last])
        yield steps.executor.evaluate(row, routes, steps.layout.tables.held_out(read, own), size)


def mean_of(totals: Sequence[Totals]) -> tuple[Heldout | None, str]:
    """Σ loss / Σ weight, Σ sum / Σ count of every metric, or why there is none.

    Example: losses 3 and 1 over weights 2 and 2 give 1.0.
    """
    for part in totals:
        verdict = judge(part.health, on_non_finite="skip")
        if verdict.do != "apply":
            return None, verdict.reason
    weight = sum(part.weight for part in totals)
    if not weight:
        return None, "none of the held-out samples counts, their weight is 0"
    sums: dict[str, tuple[float, float]] = {}
    for part in totals:
        for name, (total, count) in part.metrics.items():
            before = sums.get(name, (0.0, 0.0))
            sums[name] = before[0] + total, before[1] + count
    means = {name: total / count for name, (total, count) in sums.items() if count}
    return Heldout(loss=sum(part.loss_sum for part in totals) / weight, metrics=means), ""
