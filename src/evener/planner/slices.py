"""A card whole or in slices (MIG): which slices there are, which fit together, and what a slice takes.

    an A100 has 7 compute and 8 memory parts, of which 4g takes 4 and 4, 3g takes 3 and 4, 2g takes 2 and 2
    full:   3g + 3g takes 6 and 8        3g + 2g + 1g + 1g takes 7 and 8        1g seven times takes 7 and 7

The catalogue holds slices as kinds of their own, "CARD MIG 3g.20gb" (NVIDIA MIG user guide, supported
profiles).
"""

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

from evener.core.catalogue import KnownDevice, catalogue, known_device
from evener.errors import UsageError

_MARK = " MIG "


@dataclass(frozen=True, kw_only=True)
class Slice:
    """A kind of slice: its name ("3g.20gb"), the compute and memory parts it takes, its part of the rate."""

    name: str
    kind: str
    compute: int
    memory: int
    part: float


def card_of(kind: str) -> str | None:
    """The kind of the card that a slice is of; None for what is no slice of the catalogue."""
    known = known_device(kind)
    return known.kind.partition(_MARK)[0] if known is not None and _MARK in known.kind else None


def slices_of(kind: str) -> tuple[Slice, ...]:
    """The slices that a card of this kind can be split into, the largest first; none for most cards.

    `part` is the slice's rate over the card's. Example: 3g.20gb of an A100 is 42 of 108 multiprocessors:
    0.39.
    """
    card = known_device(kind)
    if card is None or _MARK in card.kind:
        return ()
    rows = [d for d in catalogue().devices if d.kind.startswith(card.kind + _MARK)]
    if not rows:
        return ()
    smallest = min(d.gb_per_s or 0.0 for d in rows)
    found = [_slice(d, card, smallest) for d in rows]
    return tuple(sorted(found, key=lambda s: -s.compute))


def _slice(row: KnownDevice, card: KnownDevice, smallest_gb_per_s: float) -> Slice:
    """The smallest slice has one memory part; bandwidth is shared out by memory parts."""
    name = row.kind.partition(_MARK)[2]
    match = re.match(r"(\d)g\.", name)
    assert match and row.gb_per_s, f"{row.kind} of the catalogue is no slice"
    return Slice(
        name=name,
        kind=row.kind,
        compute=int(match[1]),
        memory=round(row.gb_per_s / smallest_gb_per_s),
        part=row.tflops["float32"] / card.tflops["float32"],
    )


def partitions(kind: str) -> tuple[tuple[Slice, ...], ...]:
    """All ways to split a card of this kind to which no slice could be added, the fewest slices first.

    Left out is the one slice that is the whole card. Example: an A30 gives 2g + 2g, 2g + 1g + 1g and 1g four
    times.
    """
    slices = slices_of(kind)
    if not slices:
        return ()
    whole = slices[0]
    smaller = tuple(s for s in slices if s.compute < whole.compute)
    found = [way for way in _ways(smaller, whole.compute, whole.memory) if _full(way, smaller, whole)]
    return tuple(sorted(found, key=lambda way: (len(way), [-s.compute for s in way])))


def _ways(slices: tuple[Slice, ...], compute: int, memory: int) -> Iterator[tuple[Slice, ...]]:
    for size in range(1, compute + 1):
        for way in itertools.combinations_with_replacement(slices, size):
            if sum(s.compute for s in way) <= compute and sum(s.memory for s in way) <= memory:
                yield way


def _full(way: tuple[Slice, ...], slices: tuple[Slice, ...], whole: Slice) -> bool:
    compute = whole.compute - sum(s.compute for s in way)
    memory = whole.memory - sum(s.memory for s in way)
    return not any(s.compute <= compute and s.memory <= memory for s in slices)


def chosen(kind: str, names: list[str]) -> tuple[Slice, ...]:
    """The named slices of a card; UsageError for names it does not have and for more than it holds."""
    slices = {s.name: s for s in slices_of(kind)}
    if not slices:
        raise UsageError(f"{kind!r} cannot be split into slices", remedy="a card with MIG, such as an A100")
    unknown = [n for n in names if n not in slices]
    if unknown or not names:
        raise UsageError(
            f"{kind!r} has no slice {', '.join(unknown) or 'without a name'}",
            remedy=f"one or more of: {', '.join(slices)}",
        )
    way = tuple(slices[n] for n in names)
    whole = slices_of(kind)[0]
    used = sum(s.compute for s in way), sum(s.memory for s in way)
    if used[0] > whole.compute or used[1] > whole.memory:
        raise UsageError(
            f"{' + '.join(names)} do not fit on a {kind!r}",
            numbers=f"{used[0]} of {whole.compute} compute parts, {used[1]} of {whole.memory} memory parts",
            remedy=" or ".join(" ".join(s.name for s in w) for w in partitions(kind)[:4]),
        )
    return way
