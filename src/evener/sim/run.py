"""Many steps of a job with faults: what the survivors do, how long it takes, and what they say about it.

Steps meet at the barrier, so each is played alone from the barrier before. A device that leaves costs the
step in flight: it is thrown away, the others regroup and do it again with the plan that `replan` gives them.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from evener.core.actions import Schedule
from evener.core.faults import Fault, FaultScript
from evener.core.plan import Plan
from evener.core.routes import Routes
from evener.core.trace import Span, Trace
from evener.core.words import counted
from evener.errors import UnknownNameError
from evener.schedules.costs import Costs
from evener.schedules.timing import Times
from evener.sim.causes import ShapeIdle, shape_idle_s, spans
from evener.sim.events import EventSimulator
from evener.sim.windows import Cut, Slow, Windows

RECOVER_S = 0.045
"""Notice, regroup, first all-reduce: the most in 30 kills of one of 4 Gloo processes on a host (measured)."""

Replan = Callable[[Plan, Fault], tuple[Plan, str]]
"""(plan, event) → the plan to go on with, and the sentence why. Raises NoPlanFitsError when there is none."""


@dataclass(frozen=True, kw_only=True)
class World:
    """What a run needs to know besides the plan: how to price, order and change plans."""

    costs_of: Callable[[Plan], Costs]
    schedule_of: Callable[[Plan, Costs], Schedule]
    replan: Replan
    recover_s: float = RECOVER_S


@dataclass(frozen=True, kw_only=True)
class Run:
    """A job played: its trace, when each step's barrier was, and what happened, in sentences."""

    trace: Trace
    barriers_s: tuple[float, ...]
    plans: tuple[Plan, ...]
    log: tuple[str, ...]
    peak_bytes: dict[str, float]
    notes: tuple[str, ...]

    @property
    def step_s(self) -> tuple[float, ...]:
        """Seconds of each step; a step that was done again counts whole."""
        return tuple(b - a for a, b in zip((0.0, *self.barriers_s), self.barriers_s, strict=False))


@dataclass(kw_only=True)
class _Player:
    """The state of a run: `now` is the last barrier."""

    world: World
    plan: Plan
    windows: Windows = field(default_factory=Windows)
    now: float = 0.0
    found: list[Span] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    peaks: dict[str, float] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)

    def adopt(self, plan: Plan) -> None:
        """Price and order `plan` once; steps of it are alike."""
        self.plan, self.routes = plan, Routes(plan)
        self.costs = self.world.costs_of(plan)
        self.schedule = self.world.schedule_of(plan, self.costs)
        splits = any(a.type == "I" for row in self.schedule.actions.values() for a in row)
        self.notes |= dict.fromkeys(
            (*self.costs.notes, self.costs.split_note) if splits else self.costs.notes
        )
        self.shape: ShapeIdle = shape_idle_s(self.schedule, self.routes, self.costs)
        self.alike: tuple[Windows, float, Times] | None = None

    def play(self) -> Times:
        """The step that begins now. Where nothing begins or ends in it, it is the one before, later."""
        if self.alike:
            windows, begun_s, played = self.alike
            length = played.barrier_s - begun_s
            now = self.windows.during(self.now, self.now + length)
            if windows == now and now.cover(self.now, self.now + length):
                return played.shifted(self.now - begun_s)
        simulator = EventSimulator(self.schedule, self.routes, self.costs, self.now, self.windows)
        played = simulator.run()
        for device, line in simulator.memory.items():
            self.peaks[device] = max(self.peaks.get(device, 0.0), *(held for _, held in line))
        during = self.windows.during(self.now, played.barrier_s)
        self.alike = (during, self.now, played) if during.cover(self.now, played.barrier_s) else None
        return played

    def keep(self, played: Times, step: int) -> None:
        """The step counts: its spans join the trace and the clock moves to its barrier."""
        self.found += spans(played, self.routes, self.costs, self.shape, begin_s=self.now, step=step)
        self.now = played.barrier_s

    def lose(self, played: Times, until_s: float, step: int) -> None:
        """The step is thrown away at `until_s`; regrouping follows. All of it is overhead."""
        back_s = until_s + self.world.recover_s
        for device in self.schedule.actions:
            self.found.append(
                Span(
                    device=device, action="lost", start_s=self.now, end_s=back_s, cause="overhead", step=step
                )
            )
        self.now = back_s


def play(plan: Plan, world: World, *, steps: int = 1, faults: FaultScript | None = None) -> Run:
    """`steps` steps of `plan` with `faults`.

    UnknownNameError for a fault that names no device of the plan. Example: a step of 1 s that loses a device
    halfway takes 0.5 s + `recover_s` + the step of the survivors.
    """
    player = _Player(world=world, plan=plan)
    player.adopt(plan)
    plans, barriers = [plan], []
    waiting = list(faults.faults if faults else ())
    for step in range(steps):
        while waiting and waiting[0].at_step < step + 1:
            fault = waiting.pop(0)
            if _happens(player, fault, step):
                plans.append(player.plan)
        player.keep(player.play(), step)
        barriers.append(player.now)
    player.log += [f"{fault}: not reached in {counted(steps, 'step')}" for fault in waiting]
    return Run(
        trace=Trace(source="predicted", spans=tuple(player.found), steps=steps, note="; ".join(player.log)),
        barriers_s=tuple(barriers),
        plans=tuple(plans),
        log=tuple(player.log),
        peak_bytes=player.peaks,
        notes=tuple(player.notes),
    )


def _happens(player: _Player, fault: Fault, step: int) -> bool:
    """Let `fault` strike in `step`; True when the plan changed."""
    _check_names(player.plan, fault)
    undisturbed = player.play()
    at_s = player.now + (fault.at_step - step) * (undisturbed.barrier_s - player.now)
    if fault.type in ("slow", "cut"):
        player.windows = _with(player.windows, fault, at_s)
        player.log.append(f"step {step}: {fault}")
        return False
    changed, why = player.world.replan(player.plan, fault)
    if fault.type == "join":  # a newcomer waits for the step to end; nothing is lost
        player.log.append(f"step {step}: {fault}: {why}")
    else:
        lost_s = at_s - player.now
        player.lose(undisturbed, at_s, step)
        player.log.append(
            f"step {step}: {fault}: {lost_s:.3g} s of the step are lost and it is done again; {why}"
        )
    player.adopt(changed)
    return True


def _with(windows: Windows, fault: Fault, at_s: float) -> Windows:
    end_s = float("inf") if fault.for_s is None else at_s + fault.for_s
    if fault.type == "slow":
        assert fault.factor is not None
        slow = Slow(device=fault.device, factor=fault.factor, start_s=at_s, end_s=end_s)
        return Windows(slow=(*windows.slow, slow), cuts=windows.cuts)
    assert fault.other is not None
    cut = Cut(a=fault.device, b=fault.other, start_s=at_s, end_s=end_s)
    return Windows(slow=windows.slow, cuts=(*windows.cuts, cut))


def _check_names(plan: Plan, fault: Fault) -> None:
    """A fault that names nobody would silently do nothing."""
    known: set[str] = set(plan.devices)
    if fault.type == "cut":
        known |= {name.partition("/")[0] for name in plan.devices}
    if fault.type == "join":
        return
    missing: Iterable[str] = {fault.device, fault.other or fault.device} - known
    for name in sorted(missing):
        raise UnknownNameError(
            f"the fault '{fault}' names {name!r}, which the plan does not use at that step",
            remedy=f"one of: {', '.join(sorted(known))}",
        )
