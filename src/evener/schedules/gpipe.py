"""GPipe: all forwards, then all backwards. Every micro-batch of the step is in flight at once.

4 stages, 4 micro-batches; a forward takes one column, a backward two:

    d/0 |0 1 2 3 . . . . . . . . . 0 0 1 1 2 2 3 3|
    d/1 |. 0 1 2 3 . . . . . . 0 0 1 1 2 2 3 3 . .|
    d/2 |. . 0 1 2 3 . . . 0 0 1 1 2 2 3 3 . . . .|
    d/3 |. . . 0 1 2 3 0 0 1 1 2 2 3 3 . . . . . .|
"""


def order(position: int, num_stages: int, num_micro_batches: int) -> list[tuple[str, int]]:
    """What the stage at `position` does, in order. Example: 2 micro-batches are F0 F1 B0 B1."""
    return [(kind, m) for kind in "FB" for m in range(num_micro_batches)]
