"""Rows sent ahead to an accelerator: the same results as rows looked up when asked for, and in less time."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace as changed
from torch import nn
from torch.nn.functional import cross_entropy

from benchmarks.tables_overlap import KINDS, SMALL, one
from evener.core.actions import parse_action
from evener.core.plan import Plan
from evener.errors import ModelError
from evener.rehearsal.device.clock import Clock
from evener.rehearsal.device.driver import CardDriver
from evener.runtime.executor import Executor
from evener.runtime.holding import Alone, Settings, whole_model
from evener.runtime.problem import Problem, default_inputs
from evener.runtime.ranks import Ranks
from evener.runtime.tables.layer import TableLayer, place_table, table_layers
from evener.runtime.tables.rows import MemoryRows
from evener.runtime.tables.table import Part
from evener.runtime.tables.tiered import TieredRows
from evener.runtime.wire import SoloWire
from evener.session.exactness.verify import verify
from evener.session.layout.job_tables import JobTables
from evener.session.request import Request
from tests.local import tables as cases
from tests.local.device.opening import card_of
from tests.local.device.test_job import fleet
from tests.local.pool import Pool
from tests.local.test_placed_tables import CPU, SCRIPT, piped, stage, uneven

IDS_OF = {"word": lambda batch: batch[0][:, :3], "goods": lambda batch: batch[0][:, 3:]}
Ends = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Run:
    """What `train` ended with, how many lookups the device had to ask the host for, and rows looked up."""

    ends: Ends
    asked: int
    skipped: int
    rows: int


def train(
    card: Any,
    case: cases.Case,
    *,
    ahead: bool,
    ids_of: dict[str, Callable] = IDS_OF,
    folder: Path | None = None,
    model: Callable[[cases.Case], nn.Module] = cases.Model,
    batches: list | None = None,
) -> Run:
    """A case of one device on the card, its rows sent ahead or not; `folder`: the words in a file."""
    device = torch.device("rehearsal", 0)
    made: Any = model(case).double()
    layers = [place_table(made, name) for name in ("word", "goods")]
    for layer in layers:
        table, weight = layer.table, layer.table.part.rows.columns["weight"]
        rows: Any = MemoryRows(weight)
        if folder is not None and table.name == "word":
            rows = TieredRows(folder, table.num_rows, lambda a, b, w=weight: w[a:b], host=16)
        table.part = Part(0, table.num_rows, rows)
        table.use(cases.optimizer_of(case.rule)[1])
    made.to(device)
    optimizer = cases.head_optimizer(case, made.head.parameters())
    problem = Problem(loss=cross_entropy, inputs=default_inputs)
    ranks = Ranks(("lab/gpu0",), "lab/gpu0")
    holding = whole_model(made, problem, ranks, SoloWire(), device=device)
    tables = JobTables(layers=table_layers(made), ids_of=ids_of)
    tables.join(holding.reducers, [made])
    assert tables.sums is not None
    tables.sums.follow(optimizer)
    if ahead:
        holding = replace(holding, ahead=tables.look_ahead(device))
    settings = Settings(max_norm=case.max_norm, on_non_finite="skip")
    executor = Executor(holding, optimizer, problem, ranks, CardDriver(card), settings)
    (sizes,) = case.micro_batches
    words = [f"0{kind}{m}" for m in range(len(sizes)) for kind in "FB"] + ["0REDUCE_GRAD", "STEP"]
    row = tuple(parse_action(word) for word in words)
    stream = iter([t for batch in batches or cases.batches(case) for t in _cut(batch, sizes)])
    asked, plain = [], TableLayer.rows_of
    TableLayer.rows_of = lambda *args: (asked.append(1), plain(*args))[1]  # type: ignore[method-assign]
    skipped = 0
    try:
        for step in range(cases.STEPS):
            read = tables.ahead(lambda: next(stream), len(sizes), last=step == cases.STEPS - 1)
            result = executor.step(step, row, Alone(sizes), read, case.samples)
            skipped += int(result.verdict.do == "skip")
    finally:
        TableLayer.rows_of = plain  # type: ignore[method-assign]
    ends = {f"head.{n}": p.detach().cpu() for n, p in made.head.named_parameters()}
    ends |= {f"{x.table.name}.weight": x.table.own(torch.arange(x.table.num_rows)) for x in layers}
    executor.close()
    return Run(ends, len(asked), skipped, sum(x.table.rows_asked for x in layers))


def _cut(batch: cases.Batch, sizes: tuple[int, ...]) -> list[cases.Batch]:
    return list(zip(*(t.split(sizes) for t in batch), strict=True))


def drawn(rule: int) -> cases.Case:
    """A case of one device in three micro-batches."""
    return replace(cases.drawn(rule, 1), micro_batches=((4, 3, 4),))


def off(a: Ends, b: Ends) -> float:
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def all_rules(rank: int, world_size: int, folder: str) -> list[dict[str, Any]]:
    card = card_of(clock=Clock(host_counts=False))
    found = []
    for number, rule in enumerate(cases.RULES):
        case = drawn(number)
        plain, ahead = (train(card, case, ahead=a) for a in (False, True))
        tiered = train(card, case, ahead=True, folder=Path(folder) / str(number))
        found.append(
            {
                "rule": rule,
                "reference": off(ahead.ends, cases.reference(case)),
                "plain": off(ahead.ends, plain.ends),
                "tiered": off(tiered.ends, plain.ends),
                "asked": (plain.asked, ahead.asked),
            }
        )
    return found


def test_every_optimiser_ends_where_a_plain_loop_does(pool: Pool, tmp_path: Path) -> None:
    (found,) = pool.run(all_rules, 1, str(tmp_path))
    for row in found:
        assert row["reference"] <= 1e-10, row
        deferred = row["rule"] in ("adam", "adamw", "sgd decay")  # made up for in other portions
        # Gradients of several lookups of one table are summed in another order; else not a bit differs.
        assert row["plain"] <= (1e-12 if deferred else 1e-15), row
        assert row["tiered"] <= 1e-12, row
        # Three lookups a micro-batch; ahead, only those of the very first one are asked for.
        assert row["asked"] == (3 * 3 * cases.STEPS, 3), row


def more_ids(rank: int, world_size: int) -> float:
    card = card_of(clock=Clock(host_counts=False))
    every = dict(IDS_OF, word=lambda batch: torch.arange(cases.WORDS))
    case = drawn(cases.RULES.index("sparse adam"))
    return off(train(card, case, ahead=True, ids_of=every).ends, train(card, case, ahead=False).ends)


def test_rows_that_were_sent_and_not_asked_for_do_not_count_as_touched(pool: Pool) -> None:
    assert pool.run(more_ids, 1) == [0.0]


class Other(cases.Model):
    """Asks for other words than those in its batch, from the second micro-batch on."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        type(self).calls += 1
        return super().forward((x + (self.calls > 1)) % cases.GOODS)


def other_ids(rank: int, world_size: int) -> str:
    card = card_of(clock=Clock(host_counts=False))
    with pytest.raises(ModelError) as caught:
        train(card, drawn(0), ahead=True, model=Other)
    return str(caught.value)


def test_a_model_that_asks_for_what_is_not_in_the_batch(pool: Pool) -> None:
    (said,) = pool.run(other_ids, 1)
    assert "is asked for rows that are not among the ids found in the batch" in said
    assert 'ids={"' in said


def skipping(rank: int, world_size: int) -> list[tuple[float, int, int]]:
    card = card_of(clock=Clock(host_counts=False))
    found = []
    for number in range(len(cases.RULES)):
        case = drawn(number)

        class Once(cases.Model):
            """Gives no number in the fourth micro-batch, which is in the second step."""

            calls = 0

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                type(self).calls += 1
                return super().forward(x) * (float("nan") if type(self).calls == 4 else 1.0)

        runs = []
        for ahead in (True, False):
            Once.calls = 0
            runs.append(train(card, case, ahead=ahead, model=Once))
        found.append(
            (
                off(runs[0].ends, runs[1].ends),
                runs[0].skipped,
                runs[0].rows - train(card, case, ahead=True).rows,
            )
        )
    return found


def test_a_step_that_does_not_count_leaves_no_row_as_it_would_have_been(pool: Pool) -> None:
    (found,) = pool.run(skipping, 1)
    assert all(away <= 1e-12 and skipped == 1 for away, skipped, _ in found), found
    assert all(more == 0 for *_, more in found), f"rows that were sent again count once: {found}"


def test_the_way_of_rows_is_hidden(pool: Pool) -> None:
    """On the device's own clock; what is left is rows that the step before moved, and the last gradients."""
    asked, ahead, free = (pool.run(one, 1, kind, SMALL, "sgd")[0] for kind in KINDS)
    assert asked.step_s - free.step_s >= 0.9 * ahead.transfer_s
    assert ahead.step_s - free.step_s <= 0.1 * ahead.transfer_s
    assert ahead.rows_s <= 0.1 * ahead.transfer_s


def on_cards(plan: Plan, names: list[str]) -> Plan:
    """The plan of lab1/a and lab1/b on the cards of these names."""
    there = dict(zip(("lab1/a", "lab1/b"), names, strict=True))
    pipelines = tuple(
        changed(
            pipeline,
            stages=tuple(
                stage(s.layers, there[s.shares[0].devices[0]], s.shares[0].samples) for s in pipeline.stages
            ),
        )
        for pipeline in plan.pipelines
    )
    return changed(plan, pipelines=pipelines)


@pytest.mark.parametrize(
    "plan", [uneven(12), uneven(7, 5), piped("1f1b"), piped("zero-bubble")], ids=lambda p: p.schedule
)
def test_a_rehearsed_run_with_tables_is_exact(tmp_path: Path, plan: Plan) -> None:
    cards = fleet()
    plan = on_cards(plan, [d.name for d in cards.devices])
    script = tmp_path / "job.py"
    script.write_text(SCRIPT.format(place=CPU, device="", highest=50), encoding="utf-8")
    found = verify(
        Request(
            script=str(script),
            fleet=cards.only(plan.devices),
            run_dir=str(tmp_path),
            plan=plan,
            steps=4,
            quiet=True,
            rehearse=True,
        )
    )
    assert found is not None and found.exact, found
    assert found.parameter_error_float64 <= 1e-10
