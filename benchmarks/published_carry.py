"""Layer seconds on a kind where a model was never profiled, estimated from what was."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from evener.core.figures import Figure
from evener.core.profile import Profile, Timing

Tables = dict[tuple[int, int], np.ndarray]
"""(tensor-parallel degree, micro-batch) → layers × (forward, backward, update) seconds; unknown is 0."""


@dataclass(frozen=True, kw_only=True)
class Carried:
    """Estimated timings, and the sentence where they come from."""

    timings: tuple[Timing, ...]
    note: str


def tables_of(profile: Profile, kind: str) -> Tables:
    """The sizes at which every layer was measured on `kind`."""
    place = {layer.name: i for i, layer in enumerate(profile.layers)}
    found: Tables = {}
    count: dict[tuple[int, int], int] = {}
    for t in profile.timings:
        if t.kind == kind and t.fits:
            key = (t.tensor_parallel, t.micro_batch)
            row = found.setdefault(key, np.zeros((len(place), 3)))
            row[place[t.layer]] = [f.value if f else 0.0 for f in (t.forward_s, t.backward_s, t.update_s)]
            count[key] = count.get(key, 0) + 1
    return {key: row for key, row in found.items() if count[key] == len(place)}


def carried_over(profile: Profile, others: Sequence[Profile], kind: str) -> Carried | None:
    """Timings of `profile` on `kind` from a reference kind and another model that both kinds ran.

    With R(b) the other model's middle layer at micro-batch b, `kind` over reference, a layer takes at least
    R(largest) times its reference seconds (fixed costs vanish under a larger layer) and no less than the
    other model's smallest (launches), at most R(b) times (fixed costs grow with it). The middle of the two
    is taken, half their distance is the spread. Of several references the one whose ratios scatter least
    between degrees serves. None where no two models share two kinds.
    Example: the reference takes 4 ms, the other model 1 ms at b and 2 ms at its largest where the reference
    takes 1.5 and 4: between 4 / 2 and 4 / 1.5 ms, 2.33 ms.
    """
    pairs = list(_pairs(profile, others, kind))
    if not pairs:
        return None
    best = min(pairs, key=lambda p: p.score)
    timings: list[Timing] = []
    for (degree, size), own in best.own.items():
        if degree in best.ratio:
            low, high = _bracket(best, degree, size, own)
            timings += _timings(profile, kind, degree, size, low, high)
    note = (
        f"{profile.model} on {kind} was not profiled: seconds carried over from {best.reference} "
        f"by the ratio of {best.model}"
    )
    return Carried(timings=tuple(timings), note=note)


@dataclass(frozen=True, kw_only=True)
class _Pair:
    reference: str
    model: str
    own: Tables
    there: Tables
    here: Tables
    ratio: dict[int, np.ndarray]

    @property
    def score(self) -> tuple:
        logs = np.log([r[:2] for r in self.ratio.values()])
        no_update = any(not r[2] for r in self.ratio.values())
        return -len(self.ratio), no_update, float(logs.std()), self.reference, self.model


def _pairs(profile: Profile, others: Sequence[Profile], kind: str) -> Iterator[_Pair]:
    for reference in profile.kinds:
        own = tables_of(profile, reference)
        for other in others if reference != kind else ():
            there, here = tables_of(other, reference), tables_of(other, kind)
            ratio = {}
            for degree in sorted({d for d, _ in own} & {d for d, _ in there} & {d for d, _ in here}):
                sizes = {b for d, b in there if d == degree} & {b for d, b in here if d == degree}
                if sizes:
                    ratio[degree] = _middle_ratio(here, there, (degree, max(sizes)))
            ratio = {d: r for d, r in ratio.items() if (r[:2] > 0).all()}
            if ratio:
                yield _Pair(
                    reference=reference, model=other.model, own=own, there=there, here=here, ratio=ratio
                )


def _middle(table: np.ndarray) -> np.ndarray:
    return table[len(table) // 2]


def _middle_ratio(here: Tables, there: Tables, key: tuple[int, int]) -> np.ndarray:
    under = _middle(there[key])
    return np.divide(_middle(here[key]), under, out=np.zeros(3), where=under > 0)


def _bracket(pair: _Pair, degree: int, size: int, own: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    ratio = pair.ratio[degree]
    low = own * ratio
    floor = min((_middle(t)[:2] for (d, _), t in pair.here.items() if d == degree), key=lambda row: row.sum())
    low[1:-1, :2] = np.maximum(low[1:-1, :2], floor)
    same = ratio
    if (degree, size) in pair.here and (degree, size) in pair.there:
        same = _middle_ratio(pair.here, pair.there, (degree, size))
    high = np.maximum(low, own * np.where(same > 0, same, ratio))
    high[:, 2] = low[:, 2]
    return low, high


def scaled_by_bytes(profile: Profile, others: Sequence[Profile], kind: str) -> Carried | None:
    """The last resort: another model's middle layer on `kind`, in proportion to the bytes a layer saves.

    Between what its largest micro-batch says (fixed costs vanish) and what the same micro-batch says; the
    middle is taken, half the distance is the spread. Updates go by parameters. Example: a layer that saves
    twice as much takes twice as long.
    """
    for other in others:
        tables = tables_of(other, kind)
        place = len(other.layers) // 2
        middle = other.layers[place]
        if not tables or not middle.saved_bytes_per_sample or not middle.param_bytes:
            continue
        saved = np.array([x.saved_bytes_per_sample / middle.saved_bytes_per_sample for x in profile.layers])
        held = np.array([x.param_bytes / middle.param_bytes for x in profile.layers])
        timings: list[Timing] = []
        for (degree, size), table in tables.items():
            largest = max(b for d, b in tables if d == degree)
            steady = np.outer(saved, tables[degree, largest][place] * size / largest)
            low = np.maximum(steady, np.outer(np.minimum(saved, 1), table[place]))
            high = np.maximum(low, np.outer(saved, table[place]))
            low[:, 2] = high[:, 2] = held * table[place][2]
            timings += _timings(profile, kind, degree, size, low, high)
        note = f"{profile.model} on {kind} was not profiled: seconds of {other.model} scaled by saved bytes"
        return Carried(timings=tuple(timings), note=note)
    return None


def _timings(
    profile: Profile, kind: str, degree: int, size: int, low: np.ndarray, high: np.ndarray
) -> Iterator[Timing]:
    for layer, lows, highs in zip(profile.layers, low, high, strict=True):
        forward, backward, update = (_between(a, b) for a, b in zip(lows, highs, strict=True))
        yield Timing(
            layer=layer.name,
            kind=kind,
            micro_batch=size,
            tensor_parallel=degree,
            forward_s=forward,
            backward_s=backward,
            update_s=update,
        )


def _between(low: float, high: float) -> Figure | None:
    middle = (low + high) / 2
    return Figure(value=middle, source="assumed", spread=(high - low) / 2 / middle) if middle > 0 else None
