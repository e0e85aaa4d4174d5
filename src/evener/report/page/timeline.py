"""Traces in columns that a page can draw at once, bounded in number, hosts on one clock."""

from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from evener import schedules
from evener.core.trace import CAUSES, Span, Trace
from evener.core.words import counted
from evener.cost.evaluate import CostModel
from evener.errors import EvenerError
from evener.report.page.cells import short
from evener.report.page.document import Lanes, Timeline
from evener.report.page.files import RunFiles
from evener.sim import plan_costs, simulate

MOST_SPANS = 200_000
MOST_ACTIONS = 20_000
LONGEST_S = 1e6
"""A trace of more seconds is of no single run: its spans could not be told apart in a picture."""


def timeline(run: RunFiles) -> Timeline | None:
    """What was measured, and what the simulator predicts for a step; None where there is neither."""
    notes: list[str] = []
    found = [lanes for trace in run.traces[:2] if (lanes := lanes_of(trace, notes))]
    if len(run.traces) > 2:
        notes.append(f"trace.json holds {len(run.traces)} traces: the first two are shown")
    predicted = predicted_step(run, notes)
    if predicted:
        found += [lanes] if (lanes := lanes_of(predicted, notes)) else []
    if not found:
        return None
    return Timeline(causes=tuple((c, c) for c in CAUSES), traces=tuple(found), notes=tuple(notes))


def predicted_step(run: RunFiles, notes: list[str]) -> Trace | None:
    """A step of the plan as the simulator plays it; `notes` say why not where the files do not suffice."""
    if run.fleet is None or run.profile is None:
        notes.append("no predicted timeline: the run's folder holds no fleet.json or no profile.json")
        return None
    actions = sum(-(-p.samples // p.micro_batch) * len(p.stages) for p in run.plan.pipelines)
    if actions > MOST_ACTIONS:
        notes.append(f"no predicted timeline: a step has {actions} forwards, more than {MOST_ACTIONS}")
        return None
    try:
        costs = plan_costs(CostModel(fleet=run.fleet, profile=run.profile), run.plan)
        schedule = schedules.make(run.plan, costs=costs)
        return simulate(schedule, run.plan, costs).trace
    except EvenerError as e:
        notes.append(f"no predicted timeline: {e.what}")
    except (ValueError, KeyError, AssertionError) as e:
        notes.append(f"no predicted timeline: the files do not belong together ({type(e).__name__} {e})")
    return None


def lanes_of(trace: Trace, notes: list[str]) -> Lanes | None:
    """`trace` in columns; what had to be left out or moved is added to `notes`."""
    spans = [s for s in trace.spans if 0 <= s.end_s - s.start_s < LONGEST_S and abs(s.start_s) < 1e12]
    if len(spans) < len(trace.spans):
        odd = counted(len(trace.spans) - len(spans), "span")
        notes.append(f"{odd} of the {trace.source} trace end before they begin or last for days: left out")
    if not spans:
        return None
    shift = host_shifts(spans)
    if any(shift.values()):
        hosts = ", ".join(host for host, s in shift.items() if s)
        notes.append(f"{trace.source}: the clock of {hosts} was moved so that reductions end together")
    starts = [s.start_s + shift[s.device.partition("/")[0]] for s in spans]
    order = sorted(range(len(spans)), key=starts.__getitem__)
    if len(order) > MOST_SPANS:
        notes.append(f"the newest {MOST_SPANS} of {len(order)} {trace.source} spans are shown")
        order = order[-MOST_SPANS:]
    begin = starts[order[0]]
    if max(starts[i] for i in order) - begin > LONGEST_S:
        notes.append(f"the {trace.source} trace is longer than {LONGEST_S:g} s and is not shown")
        return None
    chosen = [spans[i] for i in order]
    devices, device = _coded([s.device for s in chosen])
    actions, action = _coded([s.action for s in chosen])
    causes = {cause: i for i, cause in enumerate(CAUSES)}
    return Lanes(
        source=trace.source,
        note=short(trace.note),
        devices=tuple(short(d, 200) for d in devices),
        actions=tuple(short(a, 80) for a in actions),
        steps=tuple(sorted({s.step for s in chosen})),
        device=device,
        action=action,
        cause=tuple(causes[s.cause] for s in chosen),
        step=tuple(s.step for s in chosen),
        start_ns=tuple(round((starts[i] - begin) * 1e9) for i in order),
        length_ns=tuple(round((s.end_s - s.start_s) * 1e9) for s in chosen),
    )


def host_shifts(spans: Sequence[Span]) -> dict[str, float]:
    """Seconds to add to each host's spans, so that the last reduction of every step ends together.

    Each host has a clock of its own; one that is right by a tenth of a step stays. Example: steps whose
    reductions end at 1.0 and 2.0 s on host a, at 501.0 and 502.0 s on host b: b moves by -500 s.
    """
    ends: dict[str, dict[int, float]] = {}
    for s in spans:
        host = s.device.partition("/")[0]
        by_step = ends.setdefault(host, {})
        if s.cause == "reduce" and s.step >= 0:
            by_step[s.step] = max(by_step.get(s.step, s.end_s), s.end_s)
    first, *others = ends
    shifts = dict.fromkeys(ends, 0.0)
    times = sorted(ends[first].values())
    step_s = median(b - a for a, b in pairwise(times)) if len(times) > 1 else 0.0
    for host in others:
        common = [ends[first][n] - t for n, t in ends[host].items() if n in ends[first]]
        if common and abs(median(common)) > step_s / 10:
            shifts[host] = median(common)
    return shifts


def _coded(names: Sequence[str]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The different names in order of first appearance, and the place of each."""
    places: dict[str, int] = {}
    coded = tuple(places.setdefault(name, len(places)) for name in names)
    return tuple(places), coded
