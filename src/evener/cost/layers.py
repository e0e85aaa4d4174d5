"""Seconds of each layer on one kind at any micro-batch size, from the measured ones."""

from dataclasses import dataclass, field

import numpy as np

from evener.core.figures import Figure
from evener.core.profile import Profile
from evener.errors import OutOfRangeError, UnknownNameError

FAR = 2
"""Up to FAR times the largest measured micro-batch seconds go on along the last slope; beyond is refused."""


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """Seconds by layer of one kind at one tensor-parallel degree, in chain order.

    Between measured sizes straight lines, below the smallest its seconds hold. A size never costs a layer
    less than a smaller one: where the measurement says so, the smaller one's seconds are used. Where the
    whole model's step was measured too, the layers add up to it.
    Example: 1 ms at size 2 and 3 ms at size 4 give 2 ms at size 3.
    """

    kind: str
    sizes: np.ndarray
    forward_table: np.ndarray
    backward_table: np.ndarray
    update_s: np.ndarray
    refused_size: int | None = None
    _rows: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)

    @property
    def largest(self) -> int:
        """The largest micro-batch that was measured and fitted."""
        return int(self.sizes[-1])

    def seconds(self, micro_batch: int) -> tuple[np.ndarray, np.ndarray]:
        """(forward, backward) seconds of each layer. OutOfRangeError beyond `FAR` times the largest size."""
        if micro_batch not in self._rows:
            if micro_batch > FAR * self.largest:
                raise OutOfRangeError(
                    f"micro-batch {micro_batch} on {self.kind!r} is far outside what was measured",
                    numbers=f"measured sizes: {', '.join(map(str, self.sizes))}",
                    remedy=f"at most {FAR * self.largest}, or a profile measured at {micro_batch}",
                )
            both = (_at(self.sizes, t, micro_batch) for t in (self.forward_table, self.backward_table))
            self._rows[micro_batch] = tuple(both)  # type: ignore[assignment]
        return self._rows[micro_batch]


def _at(sizes: np.ndarray, table: np.ndarray, size: int) -> np.ndarray:
    """Row of `table` (sizes × layers) at `size`, between rows or along the last slope."""
    if size <= sizes[0] or len(sizes) == 1:
        return table[0] * max(1.0, size / sizes[0])
    i = min(int(np.searchsorted(sizes, size)), len(sizes) - 1)
    part = (size - sizes[i - 1]) / (sizes[i] - sizes[i - 1])
    return table[i - 1] + part * (table[i] - table[i - 1])


def layer_cost(profile: Profile, kind: str, *, tensor_parallel: int = 1, side: int = 0) -> LayerCost:
    """The table of `kind`; `side` -1 or 1 takes each figure at its optimistic or pessimistic edge.

    UnknownNameError names the first layer without a measurement; OutOfRangeError when no size fitted.
    """
    rows = [t for t in profile.timings if t.kind == kind and t.tensor_parallel == tensor_parallel]
    refused = min((t.micro_batch for t in rows if not t.fits), default=None)
    # Tensors that hang on the model itself are a layer that no module runs: it takes no seconds of its own.
    never_run = {x.name for x in profile.layers if not x.output_bytes_per_sample and not x.flops_per_sample}
    by_size: dict[int, dict[str, tuple]] = {}
    update: dict[str, float] = {}
    for t in rows:
        if t.fits and (t.forward_s or t.layer in never_run) and (refused is None or t.micro_batch < refused):
            both = (edge(t.forward_s, side), edge(t.backward_s, side))
            by_size.setdefault(t.micro_batch, {})[t.layer] = both
        if t.update_s:
            update[t.layer] = max(update.get(t.layer, 0.0), edge(t.update_s, side))
    complete = [b for b in sorted(by_size) if len(by_size[b]) == len(profile.layers)]
    if not complete:
        raise _incomplete(profile, kind, tensor_parallel, by_size, refused)
    table = np.array([[by_size[b][x.name] for x in profile.layers] for b in complete])
    if tensor_parallel == 1:
        table *= _scale(profile, kind, complete, table, side)[:, None, None]
    table = np.maximum.accumulate(table, axis=0)
    return LayerCost(
        kind=kind,
        sizes=np.array(complete),
        forward_table=table[:, :, 0],
        backward_table=table[:, :, 1],
        update_s=np.array([update.get(x.name, 0.0) for x in profile.layers]),
        refused_size=refused,
    )


def edge(figure: Figure | None, side: int) -> float:
    """A figure as it is (0) or at an edge of its spread (-1, 1); 0 for none. Example: 10 ± 20 % at 1: 12."""
    return 0.0 if figure is None else figure.value * (1 + side * min(figure.spread, 0.9))


def _scale(profile: Profile, kind: str, sizes: list[int], table: np.ndarray, side: int) -> np.ndarray:
    """Whole-model step over the sum of the layers, by size: what timing layers one by one adds or misses."""
    whole = {
        s.micro_batch: edge(s.forward_s, side) + edge(s.backward_s, side)
        for s in profile.steps
        if s.kind == kind and s.fits and s.forward_s and s.backward_s
    }
    sums = table.sum(axis=(1, 2))
    return np.array([whole[b] / t if b in whole and t else 1.0 for b, t in zip(sizes, sums, strict=True)])


def _incomplete(
    profile: Profile, kind: str, degree: int, by_size: dict[int, dict[str, tuple]], refused: int | None
) -> Exception:
    degrees = f" at tensor-parallel degree {degree}" if degree > 1 else ""
    if by_size:
        size, found = max(by_size.items(), key=lambda x: len(x[1]))
        missing = next(x.name for x in profile.layers if x.name not in found)
        return UnknownNameError(
            f"the profile has no seconds of layer {missing!r} on kind {kind!r}{degrees}",
            numbers=f"{len(found)} of {len(profile.layers)} layers measured at micro-batch {size}",
            remedy="a profile with every layer at one micro-batch size or more",
        )
    if refused is not None:
        return OutOfRangeError(
            f"no measured micro-batch fitted on kind {kind!r}{degrees}",
            numbers=f"the smallest tried was {refused}",
            remedy="a profile with a smaller micro-batch, or a fleet without this kind",
        )
    return UnknownNameError(
        f"the profile of {profile.model!r} has no layers timed on kind {kind!r}{degrees}",
        numbers=f"kinds measured: {', '.join(profile.kinds) or 'none'}",
        remedy=f"`evener profile` on a {kind!r}, or a fleet without it",
    )
