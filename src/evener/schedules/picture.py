"""A schedule drawn as text, one line a device and one column a unit of time: what the comments show."""

from evener.core.actions import Schedule
from evener.core.plan import Plan
from evener.core.routes import Routes
from evener.schedules.costs import unit_costs
from evener.schedules.timing import times


def picture(schedule: Schedule, plan: Plan) -> str:
    """Compute actions over time. Columns hold the micro-batch; weight parts are letters, a for 0, b for 1.

    A forward takes one column, a backward two, its parts one each. Micro-batches above 9 (25
    for letters) are shown by their last digit (letter).
    """
    routes = Routes(plan)
    played = times(schedule, routes, unit_costs(routes))
    width = max(len(d) for d in schedule.actions)
    columns = round(max((m.end_s for row in played.moments.values() for m in row), default=0.0))
    lines = []
    for device, moments in played.moments.items():
        cells = ["."] * columns
        for moment in moments:
            action = moment.action
            if action.type in ("F", "B", "I", "W") and action.micro_batch is not None:
                m = action.micro_batch
                mark = chr(ord("a") + m % 26) if action.type == "W" else str(m % 10)
                start, end = round(moment.start_s), round(moment.end_s)
                cells[start:end] = [mark] * (end - start)
        lines.append(f"{device:{width}} |{' '.join(cells)}|\n")
    return "".join(lines)
