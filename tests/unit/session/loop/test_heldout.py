"""A held-out loss is a mean over everything, or absent with a reason: never 0 for want of numbers."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from evener.runtime.tally import HEALTHY, NON_FINITE, OUT_OF_MEMORY, Totals
from evener.session.layout.job_tables import JobTables
from evener.session.loop.heldout import Heldout, evaluate_heldout, mean_of

TOTALS = Totals(
    loss_sum=6.0,
    weight=4.0,
    metrics={"accuracy": (3.0, 4.0), "rare": (0.0, 0.0)},
    health={"lab/a": HEALTHY, "lab/b": HEALTHY},
    learning_rate={},
    computed_s={},
    compute_s={},
    samples={},
    seconds_before={},
    notice=0,
    values=(),
)


def evaluated(totals: Totals) -> tuple[Heldout | None, list[str]]:
    steps: Any = SimpleNamespace(
        recipe=SimpleNamespace(heldout=[0] * 4),
        plan=SimpleNamespace(global_batch=4),
        playbook=SimpleNamespace(forwards=lambda size: (None, ()), held_out_reads=lambda size: []),
        layout=SimpleNamespace(tables=JobTables()),
        executor=SimpleNamespace(evaluate=lambda row, routes, fetch, size: totals),
        average_buffers=lambda wire: None,
        samples_seen=64,
        decisions=[],
    )
    wire: Any = None
    return evaluate_heldout(steps, wire), steps.decisions


def test_means_over_all_devices() -> None:
    assert evaluated(TOTALS) == (Heldout(loss=1.5, metrics={"accuracy": 0.75}), [])


def test_batches_count_by_their_weight_and_one_without_a_number_spoils_the_mean() -> None:
    parts = [replace(TOTALS, loss_sum=3.0, weight=3.0), replace(TOTALS, loss_sum=5.0, weight=1.0)]
    assert mean_of(parts)[0] == Heldout(loss=2.0, metrics={"accuracy": 0.75})
    found, why_not = mean_of([*parts, replace(TOTALS, health={"lab/a": NON_FINITE})])
    assert found is None and "lab/a has a loss that is NaN" in why_not


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ({"health": {"lab/a": HEALTHY, "lab/b": NON_FINITE}}, "lab/b has a loss that is NaN or infinite"),
        ({"health": {"lab/a": OUT_OF_MEMORY, "lab/b": HEALTHY}}, "lab/a ran out of memory"),
        ({"weight": 0.0}, "none of the held-out samples counts, their weight is 0"),
    ],
)
def test_no_number_is_no_loss_and_the_run_says_why(broken: dict[str, Any], reason: str) -> None:
    found, decisions = evaluated(replace(TOTALS, **broken))
    assert found is None
    assert decisions == [f"no held-out loss after 64 samples: {reason}"]
