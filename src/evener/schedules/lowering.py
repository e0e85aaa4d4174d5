"""From compute actions to a whole schedule: sends, receives, reductions and the optimiser's step put in.

A receive stands right before the action that needs it and a send right after the one that made it; sends
do not wait. Pieces that stay on a device are not sent.
"""

from collections.abc import Mapping, Sequence

from evener.core.actions import Action, Schedule, of_micro_batch
from evener.core.routes import Routes
from evener.schedules.listing import Step


def lower(rows: Mapping[str, Sequence[Step]], routes: Routes) -> Schedule:
    """The schedule whose compute actions are `rows`.

    Example: one pipeline over a and b, rows a: 0F0 0B0, b: 1F0 1B0 gives
    a: 0F0 0SEND_F0 0RECV_B0 0B0 0REDUCE_GRAD STEP and b: 1RECV_F0 1F0 1B0 1SEND_B0 1REDUCE_GRAD STEP.
    """
    return Schedule(actions={device: tuple(_lowered(device, row, routes)) for device, row in rows.items()})


def _lowered(device: str, row: Sequence[Step], routes: Routes):
    last = {step.stage: i for i, step in enumerate(row) if step.kind in "BW"}
    waiting = reduction_order(device, routes)
    for i, (kind, stage, m) in enumerate(row):
        direction = "F" if kind == "F" else "B"
        if kind != "W" and receives(routes, device, stage, m, direction):
            yield of_micro_batch(f"RECV_{direction}", stage, m)
        yield of_micro_batch(kind, stage, m)
        if kind != "W" and sends(routes, device, stage, m, direction):
            yield of_micro_batch(f"SEND_{direction}", stage, m)
        while waiting and last.get(waiting[0], -1) <= i:
            yield Action(type="REDUCE_GRAD", stage=waiting.pop(0))
    yield from (Action(type="REDUCE_GRAD", stage=stage) for stage in waiting)
    yield Action(type="STEP")


def reduction_order(device: str, routes: Routes) -> list[int]:
    """Stages of `device`, later layers first: any two devices then reduce what they share in one order.

    Different orders on two devices give silently wrong sums.
    """
    place = {name: i for i, name in enumerate(n for s in routes.plan.pipelines[0].stages for n in s.layers)}
    held = [route for route in routes.stages if device in route.devices]
    held.sort(key=lambda r: (-max(place[n] for n in r.stage.layers), r.number))
    return [route.number for route in held]


def sends(routes: Routes, device: str, stage: int, micro_batch: int, direction: str) -> bool:
    """True when `device` hands on something of this micro-batch to another device."""
    pieces = routes.forward_pieces if direction == "F" else routes.backward_pieces
    return any(p.source == device != p.target for p in pieces(stage, micro_batch))


def receives(routes: Routes, device: str, stage: int, micro_batch: int, direction: str) -> bool:
    """True when `device` needs something from another device for its forward or backward."""
    return any(p.target == device != p.source for p in incoming(routes, stage, micro_batch, direction))


def incoming(routes: Routes, stage: int, micro_batch: int, direction: str):
    """The pieces that `stage` gets: activations ("F") or gradients ("B")."""
    route = routes.stages[stage]
    if direction == "F":
        return () if route.is_first else routes.forward_pieces(stage - 1, micro_batch)
    return () if route.is_last else routes.backward_pieces(stage + 1, micro_batch)
