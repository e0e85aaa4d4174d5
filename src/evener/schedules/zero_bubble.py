"""Zero-bubble (ZB-H1, Qi et al. 2023): backward in its input part I, which others wait for, and its weight
part W.

Stage s lets its W run s micro-batches late and fills with them the gaps that 1F1B leaves; at most as many
micro-batches are in flight as there are stages. 4 stages, 6 micro-batches; digits are F and I, letters W:

    d/0 |0 1 2 3 . . . 0 a 4 1 b 5 2 c 3 d 4 e 5 f|
    d/1 |. 0 1 2 . . 0 3 1 a 4 2 b 5 3 c 4 d 5 e f|
    d/2 |. . 0 1 . 0 2 1 3 2 a 4 3 b 5 4 c 5 d e f|
    d/3 |. . . 0 0 1 1 2 2 3 3 a 4 4 b 5 5 c d e f|
"""


def order(position: int, num_stages: int, num_micro_batches: int) -> list[tuple[str, int]]:
    """What the stage at `position` does, in order.

    Example: the last of 2 with 3 is F0 I0 F1 I1 W0 F2 I2 W1 W2.
    """
    ahead = min(num_stages - position - 1, num_micro_batches)
    actions = [("F", m) for m in range(ahead)]
    for m in range(num_micro_batches):
        if ahead + m < num_micro_batches:
            actions.append(("F", ahead + m))
        actions.append(("I", m))
        if m >= position:
            actions.append(("W", m - position))
    late = min(position, num_micro_batches)
    return actions + [("W", m) for m in range(num_micro_batches - late, num_micro_batches)]
