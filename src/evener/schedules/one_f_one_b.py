"""1F1B: as many forwards ahead as stages follow, then one forward, one backward in turn.

At most (stages behind + 1) micro-batches are in flight. 4 stages, 5 micro-batches; backward takes two
columns:

    d/0 |0 1 2 3 . . . . . . 0 0 4 1 1 . 2 2 . 3 3 . 4 4|
    d/1 |. 0 1 2 . . . . 0 0 3 1 1 4 2 2 . 3 3 . 4 4 . .|
    d/2 |. . 0 1 . . 0 0 2 1 1 3 2 2 4 3 3 . 4 4 . . . .|
    d/3 |. . . 0 0 0 1 1 1 2 2 2 3 3 3 4 4 4 . . . . . .|
"""


def order(position: int, num_stages: int, num_micro_batches: int) -> list[tuple[str, int]]:
    """What the stage at `position` does, in order. Example: the first of 2 with 3 is F0 F1 B0 F2 B1 B2."""
    ahead = min(num_stages - position - 1, num_micro_batches)
    actions = [("F", m) for m in range(ahead)]
    for m in range(num_micro_batches):
        if ahead + m < num_micro_batches:
            actions.append(("F", ahead + m))
        actions.append(("B", m))
    return actions
