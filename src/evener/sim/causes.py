"""From moments to a trace: every second of every device gets one cause.

A device that waits in a RECV waits first for the one who makes the data, then for the data on its way
(`transfer`). The first part is `bubble` as far as the same schedule would have it too if all stages took the
same time and data moved at once, and `wait` beyond that: for a slower peer. At the STEP a device waits for
the others (`bubble` or `wait`), then for gradients still being summed (`reduce`). The optimiser's step of
the round before opens a step (`optimizer`, `overhead`).
"""

from evener.core.actions import Schedule
from evener.core.routes import Routes
from evener.core.trace import Cause, Span
from evener.schedules.costs import Costs, Wire
from evener.schedules.timing import Moment, Times, times

ShapeIdle = dict[tuple[str, int], float]


def shape_idle_s(schedule: Schedule, routes: Routes, costs: Costs) -> ShapeIdle:
    """Seconds that each RECV and STEP, by (device, place in its row), waits by the schedule's shape alone."""
    played = times(schedule, routes, _balanced(routes, costs))
    idle = {}
    for device, moments in played.moments.items():
        for at, moment in enumerate(moments):
            kind = moment.action.type
            if kind == "STEP":
                idle[device, at] = played.barrier_s - moment.start_s
            elif kind.startswith("RECV"):
                idle[device, at] = moment.end_s - moment.start_s
    return idle


def _balanced(routes: Routes, costs: Costs) -> Costs:
    """Every stage of every pipeline has the same seconds in a step, the mean of all; the rest takes none.

    Example: stages of 1 s and 3 s become 2 s each; F, B, I and W keep their parts of it.
    """
    sums: dict[tuple[int, str, int], float] = {}
    totals = [0.0] * len(routes.plan.pipelines)
    for route in routes.stages:
        for m in range(len(route.sizes)):
            seconds = {kind: _slowest_s(routes, costs, route.number, kind, m) for kind in "FBIW"}
            for kind, s in seconds.items():
                key = (route.pipeline, kind, m)
                sums[key] = sums.get(key, 0.0) + s
            totals[route.pipeline] += seconds["F"] + (seconds["B"] or seconds["I"] + seconds["W"])
    mean = sum(totals) / len(routes.stages)
    compute: dict[tuple[int, str, str, int], float] = {}
    wires: dict[tuple[str, str], Wire] = {}
    for route in routes.stages:
        for m in range(len(route.sizes)):
            for device in route.devices:
                samples = routes.samples(route.number, device, m)
                for kind in "FBIW" if samples else "":
                    part = sums[route.pipeline, kind, m] / totals[route.pipeline]
                    compute[route.number, device, kind, samples] = mean * part
            for piece in routes.forward_pieces(route.number, m) + routes.backward_pieces(route.number, m):
                wires[piece.source, piece.target] = Wire()
    return Costs(compute_s=compute, wires=wires)


def _slowest_s(routes: Routes, costs: Costs, stage: int, kind: str, m: int) -> float:
    held = ((d, routes.samples(stage, d, m)) for d in routes.stages[stage].devices)
    return max(costs.compute_s.get((stage, d, kind, n), 0.0) for d, n in held if n)


def spans(
    played: Times, routes: Routes, costs: Costs, shape: ShapeIdle, *, begin_s: float = 0.0, step: int = 0
) -> list[Span]:
    """The spans of one step, device after device; each device's tile the time between two barriers."""
    arrived_s = max(m.start_s for row in played.moments.values() for m in row if m.action.type == "STEP")
    found: list[Span] = []
    for device, moments in played.moments.items():
        led, begun = played.leads[device]
        for start, end, cause in ((begin_s, led, "optimizer"), (led, begun, "overhead")):
            if end > start:
                found.append(_span(device, moments[-1], start, end, cause, step))  # type: ignore[arg-type]
        for at, moment in enumerate(moments):
            parts = _parts(device, moment, played, routes, costs, arrived_s)
            if parts and parts[0][0] == "wait":
                bubble = min(shape.get((device, at), 0.0), parts[0][1])
                parts[:1] = [("bubble", bubble), ("wait", parts[0][1] - bubble)]
            now = moment.start_s
            for cause, seconds in parts:
                if seconds > 0:
                    found.append(_span(device, moment, now, now + seconds, cause, step))
                    now += seconds
    return found


def _span(device: str, moment: Moment, start_s: float, end_s: float, cause: Cause, step: int) -> Span:
    return Span(
        device=device, action=str(moment.action), start_s=start_s, end_s=end_s, cause=cause, step=step
    )


def _parts(
    device: str, moment: Moment, played: Times, routes: Routes, costs: Costs, arrived_s: float
) -> list[tuple[Cause, float]]:
    """(cause, seconds) of one moment in order; waiting for others comes first, not yet split in two."""
    kind, start, end = moment.action.type, moment.start_s, moment.end_s
    if kind in ("F", "B", "I", "W"):
        stage, m = moment.action.stage or 0, moment.action.micro_batch or 0
        samples = routes.samples(stage, device, m)
        reading = costs.input_s.get((stage, device, samples), 0.0) if kind == "F" else 0.0
        gathering = costs.gather_s.get((stage, device, kind, m), 0.0)
        if reading or gathering:
            slower = (end - start) / costs.action_s(stage, device, kind, samples, m)
            reading, gathering = reading * slower, gathering * slower
        return [("transfer", gathering), ("input", reading), ("compute", end - start - reading - gathering)]
    if kind.startswith("RECV"):
        waited = min(max(moment.sent_s - start, 0.0), end - start)
        return [("wait", waited), ("transfer", end - start - waited)]
    if kind == "STEP":
        reached = min(arrived_s, played.barrier_s)
        return [("wait", reached - start), ("reduce", end - reached)]
    return []
