"""Published measurements in evener's own words: a file becomes profiles, a row of it a fleet and a plan.

Nothing here knows a row, a model or a kind by name. What a file lacks is taken from a second one of the same
shape, or estimated; every such step leaves a note, on the profile or on the row.
"""

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from msgspec.structs import replace

from benchmarks.published_carry import carried_over, scaled_by_bytes
from benchmarks.published_curves import curve_of_rates, slower_of
from evener.core.figures import Curve, Figure
from evener.core.profile import GroupBytes, Layer, Profile, Timing
from evener.errors import FileError, UnknownNameError

MIB = 2.0**20
TRUSTED_MIB = 1.0
SIZES_MIB = 2.0 ** np.arange(math.log2(TRUSTED_MIB), 16.01, 0.25)
LEAST_S = 1e-9
ADAM_STATE = 2
"""Copies of the parameters that Adam's two moments are."""

Rows = list[dict[str, Any]]


def read_published(path: Path, beside: Path | None = None) -> "Published":
    """The file at `path`, with `beside` (default: kinds.json in its folder, if there) for what it lacks."""
    beside = beside or path.parent / "kinds.json"
    files = [_load(path)]
    if beside.exists() and beside.resolve() != path.resolve():
        files.append(_load(beside))
    return Published(files=files)


def _load(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text())
        if not isinstance(data.get("models"), dict):
            raise ValueError("it has no models")
        return data
    except (OSError, ValueError, AttributeError) as e:
        raise FileError(f"cannot use {path}: {e}", remedy="a JSON object with models, links and rows") from e


@dataclass(frozen=True, kw_only=True)
class Published:
    """Files of published measurements, the one asked for first.

    `notes` holds by (model, kind) what was left out, looked up elsewhere or assumed, and for groups of which
    degree; 0 for all.
    """

    files: list[dict[str, Any]]
    notes: dict[tuple[str, str], dict[str, int]] = field(default_factory=dict)
    _profiles: dict[str, Profile] = field(default_factory=dict)

    @property
    def rows(self) -> Rows:
        return self.files[0].get("rows", [])

    @property
    def models(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(m for f in self.files for m in f["models"]))

    def profile(self, model: str, kinds: Sequence[str] = ()) -> Profile:
        """The measured profile of `model`; kinds of `kinds` that it lacks are estimated, see `notes`.

        UnknownNameError when no file has the model, or nothing to estimate a kind from.
        """
        if model not in self._profiles:
            self._profiles[model] = self._with_updates(self._measured(model))
        profile = self._profiles[model]
        for kind in kinds:
            if kind not in profile.kinds:
                profile = self._profiles[model] = self._with_updates(self._estimated(profile, kind))
        return profile

    def _note(self, model: str, kind: str, text: str, degree: int = 0) -> None:
        self.notes.setdefault((model, kind), {})[text] = degree

    def _measured(self, model: str) -> Profile:
        holding = [f["models"][model] for f in self.files if model in f["models"]]
        if not holding:
            raise UnknownNameError(
                f"no layers of {model!r}", remedy=f"one of the models {', '.join(self.models)}"
            )
        layers, groups = _layers(holding[0]["layer_bytes"])
        timings: dict[tuple[str, int], list[Timing]] = {}
        for which, data in enumerate(holding):
            for kind, rows in data.get("profile", {}).items():
                if rows and 1 + max(r["layer"] for r in rows) != len(layers):
                    self._note(model, kind, "a profile with another number of layers is left out")
                    continue
                for degree, found in _timings(kind, rows).items():
                    if (kind, degree) not in timings:
                        timings[kind, degree] = found
                        if which:
                            self._note(model, kind, f"groups of {degree} are from the file beside", degree)
        return Profile(
            model=model,
            layers=layers,
            group_bytes=groups,
            timings=tuple(t for found in timings.values() for t in found),
            gradient_bytes=sum(x.param_bytes for x in layers),
            state_bytes=ADAM_STATE * sum(x.param_bytes for x in layers),
        )

    def _estimated(self, profile: Profile, kind: str) -> Profile:
        others = [self._measured(m) for m in self.models if m != profile.model]
        carried = carried_over(profile, others, kind) or scaled_by_bytes(profile, others, kind)
        if carried is None:
            raise UnknownNameError(
                f"no layer times of {profile.model!r} on {kind!r}, and nothing to carry them over from",
                numbers=f"kinds measured: {', '.join(profile.kinds) or 'none'}",
                remedy="a profile of this model on this kind, or of two models on two kinds",
            )
        self._note(profile.model, kind, f"assumed: {carried.note}")
        return replace(profile, timings=(*profile.timings, *carried.timings))

    def _with_updates(self, profile: Profile) -> Profile:
        """Updates that are missing (0 in the files), by those of the kind with the nearest layer times."""
        total, update = _totals(profile)
        filled: dict[tuple[str, int], dict[str, float]] = {}
        for kind, degree in total:
            if update[kind, degree]:
                continue
            ratios = {k: total[kind, degree] / total[k, d] for k, d in total if d == degree and update[k, d]}
            near = min(ratios, key=lambda k: (abs(math.log(ratios[k])), k), default=None)
            where = f"updates on {kind} in groups of {degree}"
            if near is None:
                self._note(profile.model, kind, f"assumed: {where} take no time, none is known", degree)
                continue
            filled[kind, degree] = {n: s * ratios[near] for n, s in update[near, degree].items()}
            self._note(
                profile.model, kind, f"assumed: {where} are those on {near}, scaled as its layers", degree
            )
        timings = []
        for t in profile.timings:
            seconds = filled.get((t.kind, t.tensor_parallel), {}).get(t.layer)
            timings.append(replace(t, update_s=Figure(value=seconds, source="assumed")) if seconds else t)
        return replace(profile, timings=tuple(timings))

    def curve(self, a: tuple[str, int], b: tuple[str, int], *, inside: bool) -> tuple[Curve, str]:
        """All `a[1]` devices of a kind to `b[1]` of another at once, bytes summed, and what was assumed.

        Of both directions the slower counts. An unknown number of devices takes the nearest known; an unknown
        pair of kinds, among the nearest numbers, the slowest curve that touches either kind, or of all.
        UnknownNameError when there is none.
        """
        for which, data in enumerate(self.files):
            table = _curves(data.get("links") or {}, inside=inside)
            known = [k for k in table if {k[0][0], k[1][0]} == {a[0], b[0]}]
            if known:
                forth, back = (_nearest(known, x, y) for x, y in ((a, b), (b, a)))
                note = "" if {forth, back} <= {(a, b), (b, a)} else _as_if(a, b, forth)
                if which:
                    note = note or f"link from {a[0]} to {b[0]} is from the file beside"
                return slower_of(table[forth], table[back]), note
        pool = {k: c for f in self.files for k, c in _curves(f.get("links") or {}, inside=inside).items()}
        touching = [k for k in pool if {k[0][0], k[1][0]} & {a[0], b[0]}] or list(pool)
        if not touching:
            raise UnknownNameError(
                f"no link from {a[0]} to {b[0]}",
                remedy="curves under links.within_host and links.between_hosts",
            )
        key = min(touching, key=lambda k: (_distance(k, a, b), -pool[k].seconds(64 * MIB), k))
        return pool[key], _as_if(a, b, key)


def _distance(key: tuple, a: tuple[str, int], b: tuple[str, int]) -> int:
    return abs(key[0][1] - a[1]) + abs(key[1][1] - b[1])


def _as_if(a: tuple[str, int], b: tuple[str, int], key: tuple) -> str:
    (c, n), (d, m) = key
    return f"assumed: {a[1]} {a[0]} to {b[1]} {b[0]} as {n} {c} to {m} {d}"


def _nearest(known: list[tuple], a: tuple[str, int], b: tuple[str, int]) -> tuple:
    same = [k for k in known if (k[0][0], k[1][0]) == (a[0], b[0])] or known
    return min(same, key=lambda k: (_distance(k, a, b), k))


def _curves(links: Mapping[str, Any], *, inside: bool) -> dict[tuple, Curve]:
    """((kind, devices), (kind, devices)) → curve. A polynomial in log2 of MiB gives GB/s; see the README."""
    if inside:
        rows = [(((r["kind"], r["gpus"]),) * 2, r) for r in links.get("within_host", [])]
    else:
        rows = [
            (((r["src"], r["src_gpus"]), (r["dst"], r["dst_gpus"])), r)
            for r in links.get("between_hosts", [])
        ]
    return {key: _curve(r["poly"], r.get("peak_bytes_per_s")) for key, r in rows}


def _curve(poly: list[float], peak: float | None) -> Curve:
    rates = np.polyval(poly, np.log2(SIZES_MIB)) * 1e9
    return curve_of_rates(zip(SIZES_MIB * MIB, rates.tolist(), strict=True), peak_bytes_per_s=peak)


def _layers(rows: Rows) -> tuple[tuple[Layer, ...], tuple[GroupBytes, ...]]:
    """Layers as one device holds them, and what each device of a group holds.

    The files count a layer's output among what it saves; here it is the input that the next one saves.
    """
    held = {(r["tp"], r["layer"]): r for r in rows}
    least = min(tp for tp, _ in held)
    layers = []
    for i in range(1 + max(i for _, i in held)):
        r = held[least, i]
        layers.append(
            Layer(
                name=f"layer{i}",
                num_params=int(r["param_bytes"] * least) // 4,
                param_bytes=int(r["param_bytes"] * least),
                output_bytes_per_sample=int(r["output_bytes_per_sample"]),
                saved_bytes_per_sample=_saved(r) * least,
            )
        )
    groups = tuple(
        GroupBytes(
            layer=f"layer{i}",
            tensor_parallel=tp,
            param_bytes=int(r["param_bytes"]),
            output_bytes_per_sample=int(r["output_bytes_per_sample"]),
            saved_bytes_per_sample=_saved(r),
        )
        for (tp, i), r in held.items()
        if tp > 1
    )
    return tuple(layers), groups


def _saved(row: dict[str, Any]) -> int:
    return int(max(row["saved_bytes_per_sample"] - row["output_bytes_per_sample"], 0))


def _timings(kind: str, rows: Rows) -> dict[int, list[Timing]]:
    """Timings by degree. A larger micro-batch never takes less: the smaller one could be padded to it."""
    by_layer: dict[tuple[int, int], dict[int, dict[str, float]]] = defaultdict(dict)
    for r in rows:
        by_layer[r["tp"], r["layer"]][r["micro_batch"]] = r
    found: dict[int, list[Timing]] = defaultdict(list)
    for (degree, layer), sizes in sorted(by_layer.items()):
        updates = [r["update_s"] for r in sizes.values() if (r.get("update_s") or 0) > 0]
        least = [math.inf, math.inf]
        for size in sorted(sizes, reverse=True):
            both = [max(sizes[size].get(k) or 0.0, LEAST_S) for k in ("forward_s", "backward_s")]
            least = [min(a, b) for a, b in zip(least, both, strict=True)]
            found[degree].append(
                Timing(
                    layer=f"layer{layer}",
                    kind=kind,
                    micro_batch=size,
                    tensor_parallel=degree,
                    forward_s=Figure(value=least[0], source="table"),
                    backward_s=Figure(value=least[1], source="table"),
                    update_s=Figure(value=median(updates), source="table") if updates else None,
                )
            )
    return found


def _totals(profile: Profile) -> tuple[dict, dict]:
    """By (kind, degree): seconds of all layers per sample of the smallest micro-batch; updates by layer."""
    least: dict[tuple[str, int], int] = {}
    for t in profile.timings:
        key = (t.kind, t.tensor_parallel)
        least[key] = min(least.get(key, t.micro_batch), t.micro_batch)
    total: dict[tuple[str, int], float] = defaultdict(float)
    update: dict[tuple[str, int], dict[str, float]] = defaultdict(dict)
    for t in profile.timings:
        key = (t.kind, t.tensor_parallel)
        if t.micro_batch == least[key]:
            total[key] += sum(f.value for f in (t.forward_s, t.backward_s) if f) / t.micro_batch
        if t.update_s:
            update[key][t.layer] = t.update_s.value
    return total, update
