"""A step in flight on one device: what each action of the schedule does."""

import math
from collections.abc import Callable
from typing import Any

import torch

from evener.core.actions import Action, in_words, parse_action
from evener.core.seams import Receiving
from evener.core.trace import Cause
from evener.core.tracebacks import is_out_of_memory, last_line, misplaced, raised_in
from evener.errors import DataError, EvenerError, ModelError, PlanMismatchError
from evener.runtime.ending import Ending
from evener.runtime.holding import Bench, Portions
from evener.runtime.kept import Kept
from evener.runtime.mail import Key, Mail
from evener.runtime.parts import Alive, Carry, Part, cut_samples, join_samples, sum_of
from evener.runtime.problem import shapes_of
from evener.runtime.scope import ScopeOf, no_scope
from evener.runtime.tally import HEALTHY, NON_FINITE, OUT_OF_MEMORY, Share, Tally, Totals


class Step:
    """One step of one device while its actions run."""

    def __init__(
        self,
        bench: Bench,
        number: int,
        portions: Portions,
        fetch: Callable[[int, int], Any],
        total: int,
        scope_of: ScopeOf = no_scope,
    ) -> None:
        self.bench, self.number, self.portions, self.total = bench, number, portions, total
        self.driver, self.here = bench.driver, bench.ranks.here
        self.routed = bench.routed.of(portions)
        self._fetch_batch, self._scope_of = fetch, scope_of
        self.start_s = 0.0
        self.seconds: dict[str, float] = {}
        self.share = Share(learning_rate=bench.optimizer.param_groups[0]["lr"])
        self.ending = Ending(bench, number, self._spent)
        self.is_computed = self.is_summed = False
        self._losses: list[tuple[torch.Tensor, float]] = []
        self._alive: dict[Key, Alive] = {}
        self._mail = Mail(self.routed, self.here, bench.holding.channel, number)
        self._done = dict.fromkeys(bench.holding.parts, 0)
        self.ran: list[Key] = []  # whose backward is done
        self.kept: Kept | None = None  # of another try at this step
        self._owned = bench.holding.owned
        if self._owned:
            self._owned.begin_step(number, portions, trains=number >= 0)
        bench.holding.reducers.begin_step(number)

    def do(self, action: Action) -> None:
        """Do one action of the row."""
        text = str(action)
        with self.bench.settings.ranges(text):
            self._do(action, text)

    def _do(self, action: Action, text: str) -> None:
        kind, stage, micro_batch = action.type, action.stage or 0, action.micro_batch or 0
        key = (stage, micro_batch)
        if kind == "STEP":
            self._finish()
            return
        if kind == "REDUCE_GRAD":
            self.bench.holding.reducers.done(stage)
            return
        part = self.bench.holding.parts.get(stage)
        if part is None:
            raise PlanMismatchError(f"{self.here} does not hold stage {stage} of the action {text}")
        if not self.portions.samples(stage, self.here, micro_batch):
            return  # this device's share of a small micro-batch rounds to nothing
        if kind == "F":
            self._forward(text, part, key)
        elif kind == "B" or kind == "I":
            self._backward(text, part, key, whole=kind == "B")
            if kind == "B":
                self.ran.append(key)
        elif kind == "W":
            self._backward_weight(text, part, key)
            self.ran.append(key)
        elif kind == "SEND_F" or kind == "SEND_B":
            self._send(text, key, kind[-1])
        else:
            self._receive(text, part, key, kind[-1])

    def let_go(self) -> None:
        """Wait until what was sent has left, so that its memory can be used again."""
        self._mail.let_go()

    def _spent(self, action: str, cause: Cause, since: float, until: float | None = None) -> None:
        end = self.driver.now() if until is None else until
        self.seconds[cause] = self.seconds.get(cause, 0.0) + end - since
        self.bench.traced.append((action, since, end, cause, self.number))

    def _computed(self, action: str, since: float, until: float) -> None:
        """An action has ended; what showed of waiting for parts of others was none of its computing."""
        for name, start, end, cause in self._owned.take_waits() if self._owned else ():
            self._spent(action, "compute", since, max(start, since))
            self._spent(name, cause, start, end)
            since = end
        self._spent(action, "compute", since, max(since, until))

    def _read(self, key: Key) -> Any:
        before = self.driver.now()
        try:
            with self.bench.settings.ranges("INPUT"):
                batch = self.driver.run("INPUT", lambda: self._fetch_batch(*key))
        except EvenerError:
            raise
        except Exception as e:
            failed = DataError(
                f"reading a batch on {self.here} failed: {last_line(e)}",
                numbers=f"step {self.number}, micro-batch {key[1]}",
                remedy="try dataset[i] for these samples in a plain loop",
            )
            failed.at = key
            raise failed from e
        self._spent("INPUT", "input", before)
        return batch

    def _forward(self, action: str, part: Part, key: Key) -> None:
        batch = self._read(key) if part.reads_batch else None
        alive = self._alive[key] = Alive(scope=self._scope_of(*key))
        samples = self.portions.samples(key[0], self.here, key[1])
        self.share.samples += samples
        if part.is_last:
            alive.weight = self._counted(batch, samples)
            self.share.weight += alive.weight
        if not part.is_first:
            alive.pieces = self._mail.collected("F", key)
        counts = part.is_first or (bool(alive.pieces) and all(alive.pieces))
        if part.is_last and not alive.weight:
            counts = counts and alive.only_in_wave
        if self.share.health != HEALTHY or not counts:
            alive.scope.pass_by("forward")
            self._mail.pass_on(key, (), ())  # nothing counts, and a mean over nothing would be NaN
            return
        alive.shapes = (shapes_of(batch), shapes_of(alive.pieces), torch.is_grad_enabled())
        ahead = self.bench.holding.ahead
        if ahead is not None:
            self._await_rows(lambda: ahead.arrive(batch))

        def forward() -> dict:
            carry = join_samples(alive.pieces, part.takes, lambda copies: copies[0]) if alive.pieces else ()
            metrics = part.forward(alive, batch, carry)
            if ahead is not None:
                ahead.look()
            return {name: (float(total), float(count)) for name, (total, count) in metrics.items()}

        metrics = self._guarded(action, part, forward, alive.shapes, f"forward{part.of_stage}")
        if metrics is None:
            alive.scope.pass_by("forward")
        elif part.is_last:
            self._count_loss(alive, metrics)
        self._mail.pass_on(key, alive.outputs, part.gives)

    def _await_rows(self, wait: Callable[[], None]) -> None:
        """What is not hidden of the way of tables' rows, or of their gradients."""
        before = self.driver.now()
        self.driver.run("ROWS", wait)
        self._spent("ROWS", "transfer", before)

    def _counted(self, batch: Any, samples: int) -> float:
        try:
            return self.bench.problem.weight_of(batch, samples)
        except EvenerError:
            raise
        except Exception as e:
            raise ModelError(
                f"the weight of a batch failed on {self.here}: {last_line(e)}",
                numbers=f"step {self.number}, batch shapes {shapes_of(batch)}",
                remedy="weight=lambda batch: a number, for batches as the dataset's collate gives them",
            ) from e

    def _count_loss(self, alive: Alive, metrics: dict) -> None:
        assert alive.loss is not None
        for name, (total, count) in metrics.items():
            before = self.share.metrics.get(name, (0.0, 0.0))
            self.share.metrics[name] = (before[0] + total, before[1] + count)
        alive.scale = alive.weight if self.bench.problem.reduction == "mean" else 1.0
        self._losses.append((alive.loss.detach(), alive.scale))

    def _backward(self, action: str, part: Part, key: Key, *, whole: bool) -> None:
        """A whole backward, or its first part: what came in gets its gradients."""
        alive = self._alive.pop(key) if whole else self._alive[key]
        came = [] if part.is_last else self._mail.collected("B", key)
        counts = alive.loss is not None if part.is_last else bool(alive.outputs) and any(came)
        last = whole and self._is_last(part)
        if self.share.health != HEALTHY or not counts:
            alive.scope.pass_by("backward")
            self._mail.give_back(key, [])
            return
        seed = alive.scale / self.ending.divisor
        if self.bench.loss_scale:
            seed *= self.bench.loss_scale.value
        self.bench.holding.reducers.begin(1.0)  # weights are in the seed, and travel with the gradients
        if last:
            self.bench.holding.reducers.last_backward(part.stage)
        run = part.backward if whole else part.backward_input
        work = self._guarded(
            action,
            part,
            lambda: run(alive, seed, self._joined(part, alive, key, came)),
            (alive.shapes, last),
            f"backward{part.of_stage}",
        )
        if work is None:
            alive.scope.pass_by("backward")
        self._mail.give_back(key, work or [])

    def _backward_weight(self, action: str, part: Part, key: Key) -> None:
        """The second part of a backward: the parameters get their gradients."""
        alive = self._alive.pop(key)
        last, reducers = self._is_last(part), self.bench.holding.reducers
        if self.share.health != HEALTHY or alive.split is None:
            return
        if last:
            reducers.last_backward(part.stage)

        def work() -> None:
            reducers.take(part.backward_weight(alive))
            part.land()

        self._guarded(action, part, work, (alive.shapes, last), f"backward{part.of_stage}")

    def _is_last(self, part: Part) -> bool:
        """Whether the backward that begins is the last of its stage in this step."""
        self._done[part.stage] += 1
        return self._done[part.stage] == self.portions.num_backwards(part.stage, self.here)

    def _joined(self, part: Part, alive: Alive, key: Key, came: list[Carry]) -> Carry:
        """What came back for this micro-batch as one; zeros for samples that do not count, if others do."""
        if not came:
            return ()
        needed = [(s, t) for s, t in zip(part.gives, alive.outputs, strict=False) if t.requires_grad]
        slots, outputs = [s for s, _ in needed], tuple(t for _, t in needed)
        if not all(came):
            sizes = tuple(p.samples for p in self.routed.given("F", key))
            cuts = cut_samples(outputs, slots, sizes)
            came = [c or tuple(map(torch.zeros_like, cut)) for c, cut in zip(came, cuts, strict=True)]
        return join_samples(came, slots, sum_of)

    def _guarded(self, action: str, part: Part, work: Callable[[], Any], signature: tuple, phase: str) -> Any:
        """The result of `work`, or None after running out of memory, which is a vote and no crash."""
        before = self.driver.now()
        try:
            result = self.driver.run(action, work, signature=signature)
        except EvenerError:
            raise
        except Exception as e:
            if not is_out_of_memory(e):
                done = parse_action(action)
                failed = ModelError(
                    f"the model failed in {phase}{self._module_of(e)} on {self.here}: {last_line(e)}",
                    numbers=f"step {self.number}, {in_words(done)}, batch shapes {signature[0]}",
                    remedy=misplaced(e, "run the same batch through the model in a plain loop"),
                )
                failed.at = (done.stage or 0, done.micro_batch or 0)
                raise failed from e
            self._ran_out()
            result = None
        end = self.driver.now()
        came = max(end - part.exposed_s(), before)
        self._computed(action, before, came)
        if came < end:
            self._spent(action, "transfer", came, end)
        return result

    def _ran_out(self) -> None:
        """Memory ran out, which all will be told; what is alive makes room."""
        self.share.health = OUT_OF_MEMORY
        for alive in self._alive.values():
            alive.loss, alive.pieces, alive.outputs = None, [], ()

    def _module_of(self, error: Exception) -> str:
        held = [getattr(part.module, "held", part.module) for part in self.bench.holding.parts.values()]
        modules = [x for module in held for x in module.named_modules()]  # under the user's own names
        name = raised_in(error, {id(module): name for name, module in modules})
        return f", in module {name!r}," if name else ""

    def _send(self, action: str, key: Key, direction: str) -> None:
        before = self.driver.now()
        self._mail.send(direction, key)
        self._spent(action, "transfer", before)

    def _receive(self, action: str, part: Part, key: Key, direction: str) -> None:
        before = self.driver.now()
        sent_s = self._mail.receive(direction, key, part.device, self._arrived)
        after = self.driver.now()
        made_s = after if sent_s is None else min(max(sent_s, before), after)
        self._spent(action, "wait", before, made_s)
        self._spent(action, "transfer", made_s, after)

    def _arrived(self, receiving: Receiving) -> Carry:
        """What was awaited; nothing where there is no room for it, a vote as anywhere else."""
        try:
            return receiving.wait()
        except Exception as e:
            if isinstance(e, EvenerError) or not is_out_of_memory(e):
                raise
            self._ran_out()
            return ()

    def agree(self, tally: Tally) -> Totals:
        """Sum and gather the few numbers of the step over all devices."""
        if self._owned:
            self._owned.end_step()
        self._put_loss()
        return tally.launch(self.number, self.share).wait()

    def _put_loss(self) -> None:
        losses = torch.stack([loss for loss, _ in self._losses]).flatten().tolist() if self._losses else []
        kept = self.kept.share.loss_sum if self.kept else 0.0
        self.share.loss_sum = sum((x * w for x, (_, w) in zip(losses, self._losses, strict=True)), kept)
        if not math.isfinite(self.share.loss_sum):
            # The sum itself must stay a number, so that the others' losses can still be read.
            self.share.loss_sum = 0.0
            self.share.health = self.share.health or NON_FINITE

    def _finish(self) -> None:
        """All sums arrive, then the tally: who has it knows that everybody has the sums."""
        reducers = self.bench.holding.reducers
        if self.bench.holding.ahead is not None:
            self._await_rows(self.bench.holding.ahead.depart)  # the loss would be read behind them
        self._put_loss()
        launched = self.driver.now()
        self.share.computed_s = launched - self.start_s
        self.share.compute_s = self.seconds.get("compute", 0.0)
        self.is_computed = True
        reducers.launch_rest()
        with self.bench.settings.ranges("REDUCE_GRAD"):
            if self._owned:
                self._owned.end_step()
            reducers.wait()
            self.is_summed = True
            totals = self.bench.tally.launch(self.number, self.share).wait()
        done = self.driver.now()
        waited = min(max(totals.computed_s.values()) - totals.computed_s[self.here], done - launched)
        self._spent("REDUCE_GRAD", "wait", launched, launched + waited)
        for action, begin, end in self.bench.holding.sums_between(launched + waited, done):
            self._spent(action, "reduce", begin, end)
        self.ending.conclude(totals, None)
