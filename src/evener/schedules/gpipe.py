"""GPipe: all forwards, then all backwards. Every micro-batch of the step is in flight at once.

4 stages, 4 micro-batches; a forward takes one column, a backward two:

    d/0 |0 1 2 3 . . . . . . . . . 0 0 1 1 2 2 3 3|
    d/1 |. 0 1 2 3 . . . . . . 0 0 1 1 2 2 3 3 . .|
    d/2 |. . 0 1 2 3 . . . 0 0 1 1 2 2 3 3 . . . .|
    d/3 |. . . 0 1 2 3 0 0 1 1 2 2 3 3 . . . . . .|
"""

from evener.core.routes import Routes
from evener.schedules.listing import Rows, Step


def order(position: int, num_stages: int, num_micro_batches: int) -> list[tuple[str, int]]:
    """What the stage at `position` does, in order. Example: 2 micro-batches are F0 F1 B0 B1."""
    return [(kind, m) for kind in "FB" for m in range(num_micro_batches)]


def in_waves(routes: Routes) -> Rows:
    """GPipe for devices that meet in every layer: all go through micro-batches and layers in one order.

    A device of several stages takes each micro-batch through all of them before the next, in every pipeline,
    so that nobody waits for who waits for it. Example: stages 0 and 2 on a: 0F0 2F0 0F1 2F1 2B0 0B0 2B1 0B1.
    """
    place = {name: i for i, name in enumerate(n for s in routes.plan.pipelines[0].stages for n in s.layers)}
    first = {r.number: min(place[n] for n in r.stage.layers) for r in routes.stages}
    rows: Rows = {}
    for device in routes.devices:
        work = routes.work(device)
        forwards = sorted(work, key=lambda w: (w[1], first[w[0]]))
        backwards = sorted(work, key=lambda w: (w[1], -first[w[0]]))
        rows[device] = [Step("F", *w) for w in forwards] + [Step("B", *w) for w in backwards]
    return rows
