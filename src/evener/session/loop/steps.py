"""The steps of a job on one device: data in, executor, records out. All devices run this alike."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext

import msgspec
import torch
from torch import nn

from evener.core.actions import Schedule
from evener.core.membership import Ballot
from evener.core.order import GlobalBatch, global_batch_at, positions
from evener.core.plan import Plan
from evener.core.records import StepRecord, TableRecord
from evener.core.seams import Wire
from evener.core.words import some
from evener.errors import DataError, ModelError, NonFiniteError, OutOfMemoryError, ReductionMismatchError
from evener.policy.slow_links import LinkWatch
from evener.runtime.executor import Executor, StepResult
from evener.runtime.holding import Settings
from evener.runtime.kept import Kept, RangeOf
from evener.runtime.replicas import average_buffers
from evener.runtime.scaling import LossScale
from evener.session.layout.fewer import Meetings, record_of
from evener.session.layout.lay_out import Layout
from evener.session.layout.precision import needs_loss_scale
from evener.session.layout.scopes import Scopes
from evener.session.layout.seat import Seat
from evener.session.loop.adapting import Adapter
from evener.session.loop.feed import Feed, Samples, first_unreadable
from evener.session.loop.keeping import Keeping
from evener.session.loop.playbook import Playbook
from evener.session.loop.profiled import StepProfiler
from evener.session.loop.relieving import Relieve, unpriced
from evener.session.loop.scripted import Scripted
from evener.session.loop.stealing import Stealing
from evener.session.loop.timetable import Timetable, step_sizes
from evener.session.loop.unfinished import Unfinished, check_counted

FIRST_LOSS_SCALE = 2.0**16  # torch's own default


class Steps:
    """Takes the steps of a job and yields a record of each, one step late: seconds come with the next sum.

    `decisions` collects every sentence about a change of shares, the same on all devices.
    `at_boundary(number)` is called before each try at step `number`, when all devices are at the same place.
    `notice()` is the number of a change that this device knows to be ahead; all stop for it after one step.
    """

    def __init__(self, seat: Seat, layout: Layout, made: Mapping[int, Schedule] | None = None) -> None:
        recipe, plan, ranks, site = seat.recipe, seat.plan, seat.ranks, seat.site
        self.recipe, self.plan = recipe, plan
        self.samples = Samples(
            dataset=recipe.dataset,
            collate=recipe.collate_fn,
            workers=recipe.workers,
            shuffle=recipe.shuffle,
            seed=seat.seed,
        )
        self.ranks, self.site = ranks, site
        self.layout = layout
        trained = [p for p in layout.parameters.values() if p.requires_grad]
        # A stage without parameters (an activation, say) still follows the learning rate like the others.
        owned = layout.holding.owned
        self.optimizer = (
            owned.optimizer if owned else recipe.make_optimizer(trained or [nn.Parameter(torch.zeros(0))])
        )
        self._base_rates = [group["lr"] for group in self.optimizer.param_groups]
        layout.tables.follow(recipe, self.optimizer)
        if layout.holding.homes.state:
            layout.holding.homes.state.open(self.optimizer)
        settings = Settings(
            max_norm=recipe.max_norm,
            on_non_finite=recipe.on_non_finite,
            loss_scale=FIRST_LOSS_SCALE if needs_loss_scale(plan, recipe) else None,
            ranges=lambda action: self.profiler.range(action) if self.profiler else nullcontext(),
        )
        self._timetable = Timetable(made=made or {}, norms=layout.norms)
        self.scopes = Scopes(layout.holding, layout.norms, ranks, layout.connect)
        self._sizes = step_sizes(len(recipe.dataset), plan.global_batch)
        self._open_plan()
        self.executor = Executor(layout.holding, self.optimizer, recipe.problem, ranks, site.driver, settings)
        self.meetings: Meetings | None = None
        if layout.apart:
            self.meetings = Meetings(layout.apart, recipe, self.optimizer, self.executor)
        self.samples_seen = self.number = self.called = 0
        self._stop_at = 0
        self._looked_up: dict[int, dict[str, TableRecord]] = {}
        self.since = 0  # the first step under the plan in force
        self._unrecorded: StepResult | None = None
        self.notice: Callable[[], int] = lambda: 0
        self.at_boundary: Callable[[int], None] = lambda number: None
        self.relieve: Relieve = unpriced
        self.decisions: list[str] = []
        self.said: list[str] = []  # of this device alone, for the report
        self.adapter: Adapter | None = None
        self.link_watch: LinkWatch | None = None
        self.profiler: StepProfiler | None = None
        self.scripted: Scripted | None = None
        self.stealing: Stealing | None = None
        self.unfinished: Unfinished | None = None  # of the step to be taken first
        self.keeping: Keeping | None = None  # where others may be lost
        self._range_of: RangeOf | None = None  # of the try under way
        self._feed: Feed | None = None

    @property
    def loss_scale(self) -> LossScale | None:
        """The job's loss scale; None where no gradient is in float16."""
        return self.executor.bench.loss_scale

    def run(self, stop_at_samples: int) -> Iterator[StepRecord]:
        """Steps until `stop_at_samples` samples were seen, or a change is ahead: `called` is its number."""
        self._stop_at = stop_at_samples
        self.layout.tables.looked_up(self.ranks.here, counts=False)  # an evaluation's
        while self.samples_seen < stop_at_samples and not self.called:
            number, late = self.number, self._unrecorded
            self.at_boundary(number)
            result = self._step(number)
            if self.keeping:
                self.keeping.after_step(result.step_s)
            self._advance(result)
            if self.meetings:
                yield from self._said(self.meetings.after(result))
            elif late is not None:
                yield record_of(late, result.totals.seconds_before)
            if result.verdict.do == "shrink":
                self._shrink(result)
                continue  # the same samples again
            if result.verdict.do == "stop":
                raise NonFiniteError(
                    result.verdict.reason,
                    numbers=f"step {number}, samples {self.samples_seen} to "
                    f"{self.samples_seen + result.samples}",
                    remedy=self._to_stay_finite(),
                )
            if self.adapter:
                self._adapt(self.adapter, result)
            if self.link_watch:
                told = self.link_watch.after_step(self.ranks.here, self.layout.holding.link_rates)
                self.decisions += [f"after step {number}: {sentence}" for sentence in told]
            self.called = result.totals.notice
        if self.called:
            self.scopes.hand_out()  # whoever goes on has the statistics of all waves
        if self.meetings:
            yield from self._said(self.meetings.finish())
            self.decisions.append(self.meetings.traffic())
        elif self._unrecorded is not None:
            seconds = self.executor.gather_seconds(self.number)
            last, self._unrecorded = self._unrecorded, None
            yield record_of(last, seconds)

    def _to_stay_finite(self) -> str:
        problem = self.recipe.problem
        of_samples = problem.weight is None and problem.reduction == "mean"
        empty = "weight= where labels may be ignored: a mean over none of them is NaN; " if of_samples else ""
        return f'{empty}a lower learning rate or max_norm; on_non_finite="skip" drops such steps'

    def _said(self, told: tuple[list[StepRecord], list[str]]) -> list[StepRecord]:
        self.decisions += told[1]
        return told[0]

    def with_lookups(self, record: StepRecord) -> StepRecord:
        """The record of a step taken here, with what it looked up in this device's tables."""
        return msgspec.structs.replace(record, tables=self._looked_up.pop(record.step, {}))

    def complete(self, ballot: Ballot) -> None:
        """Conclude the step in flight as the others did."""
        self._advance(self.executor.complete(ballot))

    def keep(self) -> tuple[Kept | None, str]:
        """What is there of the step in flight, to go on with among others; or None and why not.

        The reason is empty where no step is in flight.
        """
        if self.unfinished is not None:  # it was not begun
            return self.unfinished.kept, ""
        if self.keeping is None or self._range_of is None:
            return None, ""
        return self.keeping.keep(self.executor, self._range_of)

    def abandon(self) -> StepRecord | None:
        """Drop the step in flight; the last record, with this device's seconds alone, if none was given."""
        self.executor.drop()
        last, self._unrecorded = self._unrecorded, None
        return record_of(last, {self.ranks.here: last.seconds}) if last else None

    def _advance(self, result: StepResult) -> None:
        """A step that was applied or skipped counts as taken."""
        self._unrecorded = None
        if result.verdict.do in ("apply", "skip"):
            self.samples_seen += result.samples
            self.number += 1
            self._unrecorded = result
            self._looked_up[result.number] = self.layout.tables.looked_up(self.ranks.here)

    def average_buffers(self, wire: Wire) -> None:
        """Make BatchNorm's statistics one mean over all devices, weighted by the samples each has seen.

        Those of waves are told by the device that was in all of them instead.
        """
        self.scopes.hand_out()
        average_buffers(self.recipe.model, self.parts(), wire, without=self.scopes.pooled)

    def parts(self) -> dict[str, float]:
        """By name of a parameter or buffer held here, the part of all samples that meets it here."""
        routes = self.playbook.routes(self.plan.global_batch)
        parts: dict[str, float] = {}
        for number, part in self.executor.holding.parts.items():
            micro_batches = range(routes.num_micro_batches(number))
            taken = sum(routes.samples(number, self.ranks.here, m) for m in micro_batches)
            for name in part.names:
                parts[name] = parts.get(name, 0.0) + taken / self.plan.global_batch
        return parts

    def close(self) -> None:
        """Let go of data loader, hooks and reductions."""
        if self._feed:
            self._feed.close()
        if self.stealing:
            self.stealing.close()
        if self.scripted:
            self.scripted.close()
        self.layout.tables.forget()
        self.executor.close()

    def _adapt(self, adapter: Adapter, result: StepResult) -> None:
        decision = adapter.after_step(self.plan, result)
        if decision:
            self.decisions.append(f"after step {result.number}: {decision.why}")
            if decision.do == "micro-batches":
                self.adopt(decision.plan)

    def adopt(self, plan: Plan) -> None:
        """Go on with `plan`, under which this device holds what it held; called by all devices together."""
        if self._timetable.made:
            self.decisions.append(
                f"step {self.number}: the unequal schedule was made for other micro-batches; "
                "it goes on with 1f1b"
            )
        self.scopes.hand_out()
        self._timetable = self._timetable.after_shrinking()
        self.plan, self.since = plan, self.number
        self.layout.holding.recompute({n: stage.recompute for n, _, stage in plan.numbered_stages()})
        self._open_plan()
        if self._feed:
            self._feed.close()  # what was read ahead belongs to the shares before
        self.layout.tables.forget()
        self._feed = None

    def _open_plan(self) -> None:
        """Schedules and waves of the plan now in force."""
        self.playbook = Playbook(self.plan, self.ranks.here, self._timetable.schedule)
        for samples in self._sizes:
            self.playbook.row(samples)  # a schedule that cannot be run is refused before the first step
        self.scopes.open(self.playbook.routes, self._sizes)

    def _step(self, number: int) -> StepResult:
        with self.profiler.step(number) if self.profiler else nullcontext():
            try:
                return self._take_step(number)
            except (DataError, ModelError) as e:
                if e.at is not None and self._range_of is not None:
                    e.add_numbers(self._samples_in(self._range_of(*e.at), reads=isinstance(e, DataError)))
                raise

    def _samples_in(self, part: tuple[int, int], *, reads: bool) -> str:
        """Which samples of the dataset a part of the global batch at hand has; where it is reading that
        failed, the one that fails again."""
        batch = global_batch_at(self.samples_seen, len(self.recipe.dataset), self.plan.global_batch)
        indices = self.samples.indices(batch, part)
        found = first_unreadable(self.samples.dataset, indices) if reads else None
        if found is not None:
            return f"dataset[{found}] fails"
        return f"samples of the dataset: {some([str(i) for i in indices], 16)}"

    def _take_step(self, number: int) -> StepResult:
        batch = global_batch_at(self.samples_seen, len(self.recipe.dataset), self.plan.global_batch)
        self._set_learning_rate()
        if self.unfinished is not None:
            return self._finish(number, batch, self.unfinished)
        if self._feed is None:
            self._feed = Feed(
                self.samples,
                self.plan.global_batch,
                self.playbook.reads,
                samples_seen=self.samples_seen,
                pin=self.site.torch_device.type != "cpu",
            )
        feed = self._feed
        last = self.samples_seen + batch.samples >= self._stop_at
        routes = self.playbook.routes(batch.samples)
        planned = self.playbook.row(batch.samples)
        draw = self.stealing.begin(self.plan, routes) if self.stealing else None
        row = draw.row() if draw else planned
        self._range_of = draw.range_of if draw else lambda s, m: positions(routes, s, self.ranks.here, m)
        result = self.executor.step(
            number,
            self.scripted.during(number, row, len(planned)) if self.scripted else row,
            draw or routes,
            self.stealing.fetch(draw, feed, batch)
            if self.stealing and draw
            else self.layout.tables.ahead(feed.next_batch, len(self.playbook.reads(batch)), last=last),
            batch.samples,
            self.scopes.begin_step(number, routes, draw.range_of if draw else None),
            self.notice(),
            self.meetings.own_samples(routes) if self.meetings else None,
        )
        self._check_learning_rates(result)
        if self.stealing:
            self.stealing.after_step(self.plan, result)
        return result

    def _finish(self, number: int, batch: GlobalBatch, rest: Unfinished) -> StepResult:
        """Take the rest of a step whose other samples are kept."""
        self.unfinished, self._range_of = None, rest.range_of
        routes, row = self.playbook.routes(batch.samples), rest.row()
        result = self.executor.step(
            number,
            self.scripted.during(number, row, len(row)) if self.scripted else row,
            rest.portions,
            rest.fetch(self.samples, batch),
            batch.samples,
            self.scopes.begin_step(number, routes, rest.range_of),
            self.notice(),
            kept=rest.kept,
        )
        self._check_learning_rates(result)
        check_counted(result)
        return result

    def _set_learning_rate(self) -> None:
        if self.recipe.schedule is not None:
            factor = self.recipe.rate_at(self.samples_seen)
            for group, rate in zip(self.optimizer.param_groups, self._base_rates, strict=True):
                group["lr"] = rate * factor

    def _check_learning_rates(self, result: StepResult) -> None:
        rates = result.totals.learning_rate
        if self.meetings:
            rates = {d: rates[d] for d in self.meetings.apart.circle.ranks.devices}
        if len(set(rates.values())) > 1:
            raise ReductionMismatchError(
                "devices would take this step with different learning rates",
                numbers=", ".join(f"{device} {rate:g}" for device, rate in rates.items()),
                remedy="make the schedule a function of samples seen alone",
            )

    def _shrink(self, result: StepResult) -> None:
        """Devices ran out of memory: everybody redoes the step, in smaller micro-batches or recomputing."""
        decision = self.relieve(self.plan, result.verdict.devices, result.number)
        if decision.do == "keep":
            raise OutOfMemoryError(decision.why, remedy="leave the device out, or a smaller model")
        self.decisions.append(f"step {result.number}: {decision.why}")
        self.adopt(decision.plan)
        if self.site.torch_device.type != "cpu":
            torch.accelerator.empty_cache()
