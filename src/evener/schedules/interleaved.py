"""Interleaved 1F1B (Megatron): a device holds several stages and runs micro-batches through them in rounds.

With stage i on device i mod n, rounds of n micro-batches and the warm-up of Megatron's schedule. On any other
stage → device map the same rule is used with the map's own numbers, and the warm-up grows until nothing waits
for itself. 2 devices with stages 0, 2 and 1, 3; 4 micro-batches:

    d/0 |0 1 0 1 2 . 0 0 3 1 1 2 0 0 3 1 1 . 2 2 . 3 3 2 2 3 3|
    d/1 |. 0 1 0 0 0 1 1 1 2 0 0 3 1 1 2 2 2 3 3 3 2 2 3 3 . .|
"""

from collections.abc import Sequence


def order(
    positions: Sequence[int], place: int, num_devices: int, num_micro_batches: int, extra: int = 0
) -> list[tuple[str, int, int]]:
    """What a device does with its stages at `positions` of the pipeline: (type, position, micro-batch) in
    order.

    `place` is the device's place among `num_devices`; `extra` forwards more run ahead.
    """
    forwards = _rounds(sorted(positions), num_devices, num_micro_batches)
    backwards = _rounds(sorted(positions, reverse=True), num_devices, num_micro_batches)
    ahead = (len(positions) - 1) * num_devices + 2 * (num_devices - place - 1) + extra
    ahead = min(ahead, len(forwards))
    actions = [("F", *f) for f in forwards[:ahead]]
    for i, b in enumerate(backwards):
        if ahead + i < len(forwards):
            actions.append(("F", *forwards[ahead + i]))
        actions.append(("B", *b))
    return actions


def _rounds(positions: Sequence[int], size: int, num_micro_batches: int) -> list[tuple[int, int]]:
    """Each stage in turn for every round of `size` micro-batches; the last round may be shorter."""
    return [
        (position, m)
        for start in range(0, num_micro_batches, size)
        for position in positions
        for m in range(start, min(start + size, num_micro_batches))
    ]
