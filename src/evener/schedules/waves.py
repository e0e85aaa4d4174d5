"""Whether devices that meet in every BatchNorm of a micro-batch can run their rows without a deadlock.

a   0F0 0F1 0B0 …      a waits in 0F1 for b, which waits in 2B0 for a: two pipelines that run their
b   2F0 2B0 2F1 …      micro-batches in another order cannot pool the statistics of a wave
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from evener.core.actions import Action, Schedule
from evener.core.plan import Plan
from evener.core.routes import Routes

Meeting = tuple[str, str, int]  # forward or backward, layer, micro-batch
Wait = tuple[Action, Meeting | None]
_NEIGHBOUR = {"RECV_F": ("SEND_F", -1), "RECV_B": ("SEND_B", 1)}


def wave_deadlock(schedule: Schedule, plan: Plan, layers: Mapping[int, Sequence[str]]) -> str:
    """The sentence who waits for whom when `plan` runs `schedule` with pooled statistics; empty when all end.

    `layers` has the names of the BatchNorm layers of each stage, in the order in which they run. All devices
    that have a micro-batch of the same number meet at each of them, in forward and again in backward.
    Example: pipelines of one and of two stages under 1F1B wait for each other; under GPipe they do not.
    """
    routes = Routes(plan)
    members: dict[Meeting, set[tuple[str, int]]] = defaultdict(set)
    for device in routes.devices:
        for stage, m in routes.work(device):
            for name in layers.get(stage, ()):
                members["F", name, m].add((device, stage))
                members["B", name, m].add((device, stage))
    halves = [f"{d} runs {a}" for d, row in schedule.actions.items() for a in row if a.type == "I"]
    if halves and any(len(there) > 1 for there in members.values()):
        return f"BatchNorm meets once in a whole backward, and {halves[0]}, half of one"
    left = {device: _waits(row, layers) for device, row in schedule.actions.items()}
    senders: dict[Action, set[str]] = defaultdict(set)
    for device, row in schedule.actions.items():
        for action in row:
            senders[action].add(device)
    sent: set[tuple[str, Action]] = set()

    def may_go(device: str) -> list[str]:
        """The devices that go on together from here; none when some are not there yet."""
        action, meeting = left[device][0]
        if meeting is not None:
            there = members[meeting]
            ready = all(left[d] and left[d][0][1] == meeting and left[d][0][0].stage == s for d, s in there)
            return [d for d, _ in there] if ready else []
        needed = _sent_before(action)
        return [device] if needed is None or all((d, needed) in sent for d in senders[needed]) else []

    moved = True
    while moved:
        moved = False
        for device in left:
            while left[device] and (group := may_go(device)):
                for one in group:
                    sent.add((one, left[one].pop(0)[0]))
                moved = True
    stuck = [f"{device} at {left[device][0][0]}" for device in left if left[device]]
    return f"devices wait for each other in BatchNorm: {', '.join(stuck)}" if stuck else ""


def _waits(row: Sequence[Action], layers: Mapping[int, Sequence[str]]) -> list[Wait]:
    found: list[Wait] = []
    for action in row:
        if action.type in ("F", "B") and action.stage is not None and action.micro_batch is not None:
            names = list(layers.get(action.stage, ()))
            way = "F" if action.type == "F" else "B"
            for name in names if way == "F" else reversed(names):
                found.append((action, (way, name, action.micro_batch)))
        found.append((action, None))
    return found


def _sent_before(action: Action) -> Action | None:
    if action.type not in _NEIGHBOUR or action.stage is None:
        return None
    kind, step = _NEIGHBOUR[action.type]
    return Action(type=kind, stage=action.stage + step, micro_batch=action.micro_batch)  # type: ignore[arg-type]
