"""Whole numbers from ratios: how samples are shared out so that the parts sum exactly."""

import itertools
from collections.abc import Sequence

from evener.core.fleet import Fleet
from evener.core.words import counted, some
from evener.errors import UsageError


def apportion(total: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Split `total` in whole parts as near to `weights` as whole numbers allow (largest remainder).

    Ties go to the earlier part. Example: apportion(16, (1, 1, 1)) = (6, 5, 5); apportion(10, (5, 3, 2)) =
    (5, 3, 2). Raises ValueError for negative weights or weights that are all 0.
    """
    whole = sum(weights)
    if total < 0 or not whole > 0 or min(weights) < 0:
        raise ValueError(f"cannot share {total} by weights {tuple(weights)}")
    exact = [total * w / whole for w in weights]
    parts = [int(x) for x in exact]
    by_remainder = sorted(range(len(parts)), key=lambda i: (parts[i] - exact[i], i))
    for i in by_remainder[: total - sum(parts)]:
        parts[i] += 1
    return tuple(parts)


def spans_of(parts: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Half-open ranges laid end to end. Example: (5, 3, 2) gives ((0, 5), (5, 8), (8, 10))."""
    edges = [0]
    for part in parts:
        edges.append(edges[-1] + part)
    return tuple(itertools.pairwise(edges))


def split_of(text: str | None, fleet: Fleet, option: str = "--batch-per-device") -> dict[str, int] | None:
    """Numbers by device, as people write them: one for each of `fleet`, in order, or device=number.

    UsageError for anything else, UnknownNameError for a device that is not there.
    Example: "2,0,15" gives {"h/a": 2, "h/b": 0, "h/c": 15}, and "h/c=15" gives {"h/c": 15}.
    """
    if not text:
        return None
    names = [d.name for d in fleet.devices]
    pairs = [w.strip().rpartition("=") for w in text.split(",") if w.strip()]
    has_names = any(equals for _, equals, _ in pairs)
    is_mixed = has_names and not all(equals for _, equals, _ in pairs)
    numbers = [n.strip() for _, _, n in pairs]
    if not pairs or is_mixed or not all(n.isascii() and n.removeprefix("-").isdigit() for n in numbers):
        raise UsageError(
            f"cannot read {option} {text!r:.80}: it has whole numbers, or a device and its number each",
            remedy=f"{','.join('1' * min(len(names), 8))} in the order of the fleet, or {names[0]}=1,...",
        )
    if has_names:
        named = [fleet.device(name.strip()).name for name, _, _ in pairs]
        twice = sorted({n for n in named if named.count(n) > 1})
        if twice:
            raise UsageError(f"{option} names {', '.join(twice)} more than once", remedy="one number each")
        names = named
    elif len(pairs) != len(names):
        raise UsageError(
            f"{option} has {counted(len(pairs), 'number')} for {counted(len(names), 'device')}",
            numbers=f"devices: {some(names, 8)}",
            remedy="one number a device, 0 to leave one out, or name=number",
        )
    return dict(zip(names, map(int, numbers), strict=True))
