"""Hosts that take steps by themselves: who they are, when they meet, and records once all have told theirs.

step        0      1      2      3 ═══ meeting     local: steps 0 … 3 are told at once
record                                 0 1 2       a record has the seconds told with the step after it
"""

from dataclasses import dataclass, replace

import torch
from torch import nn

from evener.core.exchange import Exchange, exchange_of
from evener.core.fewer import Fewer, fewer_in
from evener.core.plan import Plan
from evener.core.records import StepRecord
from evener.core.routes import Routes
from evener.core.words import counted
from evener.cost.fewer import bytes_between
from evener.errors import NonFiniteError, PlanMismatchError, UsageError
from evener.runtime.agreement import judge
from evener.runtime.executor import Executor, StepResult
from evener.runtime.holding import Circle
from evener.runtime.outer.between import Between
from evener.runtime.outer.late import Late
from evener.runtime.outer.local import Group, LocalSteps
from evener.runtime.ranks import Ranks
from evener.runtime.tally import Totals
from evener.session.layout.precision import needs_loss_scale
from evener.session.layout.seat import Seat
from evener.session.layout.tables import table_names
from evener.session.recipe import Recipe
from evener.session.request import Request

NOT_ELASTIC = (
    "hosts take steps by themselves ({}): the job ends when a device is lost, and none may join, as their "
    "weights differ between exchanges"
)


@dataclass(frozen=True, kw_only=True)
class Apart:
    """The groups of a plan whose hosts take steps by themselves, and this device's ends."""

    fewer: Fewer
    exchange: Exchange
    circle: Circle
    between: Between

    @property
    def group(self) -> Group:
        """Groups by their first devices."""
        number = self.exchange.groups.index(self.exchange.group_of(self.circle.ranks.here))
        return Group(tuple(g[0] for g in self.exchange.groups), number)


def open_apart(seat: Seat) -> Apart | None:
    """This device's part where hosts take steps by themselves, else None; called by all devices together."""
    plan, site, here = seat.plan, seat.site, seat.ranks.here
    fewer = plan.fewer
    if fewer is None or not fewer.parts_hosts:
        return None
    exchange = exchange_of(plan.reductions, seat.ranks.devices)
    assert exchange is not None, "checked before"
    own = exchange.group_of(here)
    groups = {g: seat.new_group(g) for g in exchange.groups if len(g) > 1}
    wire = seat.wire(own, groups.get(own))
    between = site.between(
        seat.fleet, plan.devices, exchange, seat.seed, seat.new_group, rehearse=seat.rehearse
    )
    late = None
    if fewer.how == "delayed":
        late = Late([p for p in seat.recipe.model.parameters() if p.requires_grad], between)
    return Apart(
        fewer=fewer,
        exchange=exchange,
        circle=Circle(ranks=Ranks(own, here), wire=wire, late=late),
        between=between,
    )


class Meetings:
    """What the groups of a job tell each other, between steps. Every device has one and calls it alike."""

    def __init__(self, apart: Apart, recipe: Recipe, optimizer: torch.optim.Optimizer, executor: Executor):
        self.apart, self._executor = apart, executor
        self.late = apart.circle.late
        self.local: LocalSteps | None = None
        trained = [p for p in recipe.model.parameters() if p.requires_grad]
        self._num_bytes = sum(_bytes_between(p) for p in trained)
        if apart.fewer.how == "local":
            assert apart.fewer.every is not None
            outer = apart.fewer.every, apart.fewer.rate, apart.fewer.momentum
            self.local = LocalSteps(
                trained, optimizer, apart.between, apart.group, outer, recipe.on_non_finite
            )
        self._results: list[StepResult] = []  # taken, and not told to all yet
        self._told: list[tuple[StepResult, Totals]] = []  # known, but for the seconds of the last
        self.exchanges = self.steps = 0

    def own_samples(self, routes: Routes) -> int:
        """Samples of a step that this device's group takes."""
        own = self.apart.circle.ranks.devices
        pipelines = routes.plan.pipelines
        return sum(p.samples for p in pipelines if p.devices[0] in own)

    def after(self, result: StepResult) -> tuple[list[StepRecord], list[str]]:
        """Records that are complete now, and sentences. A step that is to be redone does not count."""
        if result.verdict.do not in ("apply", "skip"):
            return [], []
        self._results.append(result)
        self.steps += 1
        if self.late is not None:
            self.exchanges += 1
            before = self.late.arrived
            if before is None:
                return [], []
            return self._tell(before.view(1, -1))
        assert self.local is not None
        weight = result.totals.weight if result.verdict.do == "apply" else 0.0
        return self._meet() if self.local.took(weight) else ([], [])

    def finish(self) -> tuple[list[StepRecord], list[str]]:
        """The run has ended: all groups end with one model. The last record lacks seconds of its own."""
        records: list[StepRecord] = []
        said: list[str] = []
        if self.late is not None and self._results:
            self.late.settle()
            self.exchanges += 1
            assert self.late.arrived is not None
            records, said = self._tell(self.late.arrived.view(1, -1))
        elif self.local is not None and self._results:
            whole = not self.exchanges and self.local.steps == self.steps  # nothing before a resumption
            short = shorter_than_a_round(self.steps, self.apart.fewer) if whole else ""
            records, said = self._meet()
            said = [short, *said] if short else said
        if self._told:
            result, totals = self._told.pop()
            seconds = self._executor.gather_seconds(result.number + 1)
            records.append(record_of(replace(result, totals=totals), seconds))
        return records, said

    def traffic(self) -> str:
        """What went between hosts, and what a sum a step would have sent; bytes both ways, all hosts."""
        each = bytes_between(self._num_bytes, self.apart.exchange)
        exact = 2 * (len(self.apart.exchange.groups) - 1) * self._num_bytes
        return (
            f"between hosts: {counted(self.exchanges, 'exchange')} in {counted(self.steps, 'step')}, "
            f"{self.exchanges * each / 1e6:.4g} MB; a sum of all bits every step would be "
            f"{self.steps * exact / 1e6:.4g} MB"
        )

    def _meet(self) -> tuple[list[StepRecord], list[str]]:
        assert self.local is not None
        numbers = torch.tensor([r.totals.values for r in self._results], dtype=torch.float64)
        flat, start = numbers.flatten(), self._executor.driver.now()
        last = self._results[-1]
        try:
            said = self.local.meet(flat)
        except NonFiniteError as e:
            where = f"step {last.number}, the last of a round, {e.numbers}"
            raise NonFiniteError(e.what, numbers=where, remedy=e.remedy) from e
        self.exchanges += 1
        spent = self._executor.driver.now() - start
        self._executor.add_seconds("reduce", spent)
        self._results[-1] = replace(last, step_s=last.step_s + spent)
        records, more = self._tell(flat.view_as(numbers))
        return records, [f"after step {last.number}: {s}" for s in said] + more

    def _tell(self, rows: torch.Tensor) -> tuple[list[StepRecord], list[str]]:
        """The first steps that were not told yet are known in full now: by row the tally of all groups."""
        said = []
        for row in rows.tolist():
            result = self._results.pop(0)
            totals = self._executor.read(row)
            self._told.append((result, totals))
            verdict = judge(totals.health, on_non_finite="skip", weight=totals.weight)
            if verdict.do != "apply" and result.verdict.do == "apply":
                said.append(f"step {result.number}: {verdict.reason}: the part of that group does not count")
        records = []
        while len(self._told) > 1:
            result, totals = self._told.pop(0)
            records.append(record_of(replace(result, totals=totals), self._told[0][1].seconds_before))
        return records, said


def shorter_than_a_round(steps: int, fewer: Fewer) -> str:
    """A sentence where so many steps, all of a run, are fewer than one round has; else "".

    Example: 3 steps of local:16 meet once, at the end.
    """
    every = fewer.every or 1
    if steps >= every:
        return ""
    return (
        f"the run's {counted(steps, 'step')} are fewer than the {every} of one round of {fewer}: hosts "
        "exchange once, at its end"
    )


def record_of(result: StepResult, seconds: dict[str, dict[str, float]]) -> StepRecord:
    """The record of a step whose seconds by device and cause are known."""
    ok = result.verdict.do == "apply"
    return StepRecord(
        step=result.number,
        samples=result.samples,
        step_s=result.step_s,
        loss=result.totals.loss if ok else None,
        lr=next(iter(result.totals.learning_rate.values())),
        seconds=seconds,
        skipped="" if ok else result.verdict.reason,
    )


def parting_ways(request: Request, recipe: Recipe) -> str:
    """The ways allowed or planned for this run in which hosts take steps by themselves; "" for none."""
    allowed = fewer_in(request.fewer or tuple(recipe.fewer))
    if request.plan is not None:
        allowed = (request.plan.fewer,) if request.plan.fewer else ()
    return ", ".join(str(f) for f in allowed if f.parts_hosts)


def check_fewer(plan: Plan, recipe: Recipe) -> None:
    """PlanMismatchError or UsageError where hosts cannot take steps by themselves as `plan` says."""
    fewer = plan.fewer
    if fewer is None or not fewer.parts_hosts:
        return
    if not plan.is_data_parallel or exchange_of(plan.reductions, plan.devices) is None:
        raise PlanMismatchError(
            f"the plan has fewer exchanges ({fewer}), but not between groups of whole models",
            numbers=f"{counted(len(plan.pipelines), 'pipeline')}, "
            f"{counted(len(plan.reductions), 'reduction')}",
            remedy="data parallelism with groups and lanes: --sums grouped",
        )
    what = {
        "placed tables": bool(table_names(recipe)),
        "BatchNorm over waves": recipe.batch_norm == "wave",
        "stealing": plan.steal,
        "owners of unequal state": bool(plan.owners),
        "parameters or an optimiser on the host": any(s.residence for _, _, s in plan.numbered_stages()),
        "a loss scale (float16)": needs_loss_scale(plan, recipe),
    }
    found = [name for name, has in what.items() if has]
    if found:
        raise UsageError(
            f"{fewer} and {', '.join(found)} exclude each other: that needs all devices in every step",
            remedy=f"without one of them; or accumulate in the place of {fewer.how}",
        )


def _bytes_between(p: nn.Parameter) -> int:
    numbers = p.numel() * (2 if p.is_complex() else 1)
    return numbers * (8 if p.dtype in (torch.float64, torch.complex128) else 4)
