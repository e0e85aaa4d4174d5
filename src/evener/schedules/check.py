"""What must hold of a schedule: each micro-batch once a stage, matched sends, no deadlock, STEP last."""

from collections import Counter

from evener.core.actions import Action, Schedule, of_micro_batch
from evener.core.plan import Plan
from evener.core.routes import Routes
from evener.errors import ScheduleError
from evener.schedules.lowering import receives, reduction_order, sends
from evener.schedules.timing import Pass

_COMPUTE = ("F", "B", "I", "W")


def check(schedule: Schedule, plan: Plan) -> list[str]:
    """Everything that is wrong with `schedule` for `plan`, a sentence each; empty when it is sound."""
    routes = Routes(plan)
    problems = [f"{d} is in the plan and has no row" for d in routes.devices if d not in schedule.actions]
    for device, row in schedule.actions.items():
        if device not in routes.devices:
            problems.append(f"{device} has a row and is not in the plan")
        else:
            problems += [f"{device}: {p}" for p in _row_problems(device, row, routes)]
    if not problems:
        try:
            Pass(schedule, routes, None).run()
        except ScheduleError as error:
            problems.append(f"{error.what}: {error.numbers}")
    return problems


def ensure(schedule: Schedule, plan: Plan) -> Schedule:
    """`schedule` itself when it is sound; else ScheduleError with what is wrong."""
    problems = check(schedule, plan)
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise ScheduleError(
            "the schedule does not fit the plan",
            numbers="; ".join(problems[:3]) + more,
            remedy="evener.schedules.make(plan), or the printed rows put right",
        )
    return schedule


def _row_problems(device: str, row: tuple[Action, ...], routes: Routes) -> list[str]:
    problems = []
    counts = Counter(row)
    work = set(routes.work(device))
    for action in counts:
        if action.type in ("REDUCE_GRAD", "STEP"):
            continue
        if (action.stage, action.micro_batch) not in work:
            problems.append(f"{action} is no work of this device")
    for stage, m in sorted(work):
        problems += _micro_batch_problems(device, counts, routes, stage, m)
    problems += [f"{a} is there {n} times" for a, n in counts.items() if n > 1]
    if not row or row[-1].type != "STEP" or counts[row[-1]] != 1:
        problems.append("the row must end with its only STEP")
    return problems or _order_problems(device, row, routes)


def _micro_batch_problems(device: str, counts: Counter, routes: Routes, stage: int, m: int) -> list[str]:
    def has(kind: str) -> bool:
        return of_micro_batch(kind, stage, m) in counts

    problems = [] if has("F") else [f"{stage}F{m} is missing"]
    kinds = "".join(kind for kind in "BIW" if has(kind))
    if kinds not in ("B", "IW"):
        found = f"has {' '.join(kinds)}" if kinds else "is missing"
        problems.append(f"the backward of stage {stage}, micro-batch {m} {found}: either B, or I and W")
    for way in "FB":
        for verb, wanted in (("SEND", sends), ("RECV", receives)):
            needed = wanted(routes, device, stage, m, way)
            if needed != has(f"{verb}_{way}"):
                problems.append(f"{stage}{verb}_{way}{m} is {'missing' if needed else 'without a peer'}")
    return problems


def _order_problems(device: str, row: tuple[Action, ...], routes: Routes) -> list[str]:
    """Order inside one row: receive, compute, send; reductions after the last backward, later layers
    first.
    """
    place = {action: i for i, action in enumerate(row)}
    problems = []

    def before(first: Action | None, second: Action | None) -> None:
        if first in place and second in place and place[first] > place[second]:
            problems.append(f"{second} comes before {first}")

    for stage, m in routes.work(device):
        at = {
            kind: of_micro_batch(kind, stage, m)
            for kind in (*_COMPUTE, "SEND_F", "RECV_F", "SEND_B", "RECV_B")
        }
        for first, second in (("RECV_F", "F"), ("F", "SEND_F"), ("F", "B"), ("F", "I"), ("I", "W")):
            before(at[first], at[second])
        for kind in "BI":
            before(at["RECV_B"], at[kind])
            before(at[kind], at["SEND_B"])
        for kind in "BW":
            before(at[kind], Action(type="REDUCE_GRAD", stage=stage))
    reduced = [a.stage for a in row if a.type == "REDUCE_GRAD"]
    if reduced != reduction_order(device, routes):
        wanted = " ".join(f"{s}REDUCE_GRAD" for s in reduction_order(device, routes))
        problems.append(f"the reductions must be {wanted}, in this order")
    return problems
