"""Parts of state by memory: every owner takes the same until its memory is full, or by weights.

caps    6 2 9      water 4 │ ██ ▒▒ ██     parts 4 2 4 of 10: the second is full, the others share the rest
"""

from collections.abc import Sequence

_STEPS = 60  # of a bisection


def filled(caps: Sequence[int], weights: Sequence[float], total: int) -> tuple[int, ...] | None:
    """Whole parts of `total` with the smallest possible maximum of part / weight, none above its cap.

    None when the caps do not hold `total`. Example: caps 6, 2, 9 and equal weights of 10 give 4, 2, 4.
    """
    useful = [max(cap, 0) if weight > 0 else 0 for cap, weight in zip(caps, weights, strict=True)]
    if sum(useful) < total:
        return None

    def parts(level: float) -> list[int]:
        return [min(cap, int(level * w)) for cap, w in zip(useful, weights, strict=True)]

    low, high = 0.0, max(cap / w for cap, w in zip(useful, weights, strict=True) if w > 0) + 1.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if sum(parts(middle)) >= total else (middle, high)
    found = parts(high)
    for _ in range(sum(found) - total):
        most = max((i for i, part in enumerate(found) if part), key=lambda i: (found[i] / weights[i], i))
        found[most] -= 1
    return tuple(found)


def simple(parts: Sequence[int], caps: Sequence[int], total: int) -> list[tuple[int, ...]]:
    """The same proportions in smaller numbers, where the caps (of `total`) allow them; the smallest first.

    Example: 500, 301, 199 of 1000 with room to spare give 5:3:2.
    """
    found = []
    for whole in (10, 20, 50, 100, 200):
        rooms = [max(cap, 0) * whole // total for cap in caps]
        wanted = [part * whole / total for part in parts]
        fitting = [min(round(w), room) for w, room in zip(wanted, rooms, strict=True)]
        while (missing := whole - sum(fitting)) != 0:
            step = 1 if missing > 0 else -1
            able = [i for i, f in enumerate(fitting) if (f < rooms[i] if step > 0 else f > 0)]
            if not able:
                break
            best = max(able, key=lambda i: (step * (wanted[i] - fitting[i]), -i))
            fitting[best] += step
        else:
            found.append(tuple(fitting))
    return found
