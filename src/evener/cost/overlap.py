"""What of the gradient reduction shows: buckets leave while the last backward still runs.

last backward   |--- layers 3,2 ---|--- layer 1 ---|--- layer 0 ---|
link                               |== bucket 0 ==||= bucket 1 =|  |== bucket 2 ==|
                                                                   '-- exposed ---'
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from evener.core.buckets import BUCKET_BYTES, fill_buckets
from evener.core.profile import Profile
from evener.cost.memory import bytes_by_layer

MOST_PIECES = 8
"""A layer fills at most so many buckets: a large tensor is not cut, and a layer has a few (assumed)."""


def pieces_of(num_bytes: float, limit: float = BUCKET_BYTES) -> int:
    """Buckets that a layer's gradient of `num_bytes` fills. Example: 20 MiB fill 3 of 8 MiB."""
    return min(MOST_PIECES, max(1, math.ceil(round(num_bytes) / limit)))


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Bytes that travel together, and the part of the last backward after which they are ready."""

    num_bytes: int
    ready: float


def gradient_buckets(profile: Profile) -> tuple[Bucket, ...]:
    """The buckets of a model's gradients in the order in which they leave.

    Sizes come from the layers' `param_bytes`, of tied ones once, scaled to `gradient_bytes` where that is
    given; a layer above `BUCKET_BYTES` leaves in pieces, ready in step with its backward. Backward is shared
    out by measured layer times, else by FLOPs, else by bytes. Example: two equal layers of 5 MiB give
    buckets ready at 0.5 and 1.0.
    """
    sizes = bytes_by_layer(profile.layers).tolist()
    whole = sum(sizes)
    scale = profile.gradient_bytes / whole if profile.gradient_bytes and whole else 1.0
    pieces: list[int] = []
    ready: list[float] = []  # in chain order, like pieces
    weights = _backward_weights(profile)
    total = sum(weights)
    done_before = total
    for size, weight in zip(sizes, weights, strict=True):
        count = pieces_of(size * scale)
        for piece in range(count):
            pieces.append(round(size * scale / count))
            ready.append((done_before - weight * piece / count) / total)
        done_before -= weight
    buckets = []
    for indices in fill_buckets(pieces):
        num_bytes = sum(pieces[i] for i in indices)
        if num_bytes:
            buckets.append(Bucket(num_bytes=num_bytes, ready=ready[indices[-1]]))
    return tuple(buckets)


def _backward_weights(profile: Profile) -> list[float]:
    measured: dict[str, float] = {}
    sizes: dict[str, int] = {}
    for row in profile.timings:
        if row.fits and row.backward_s and row.micro_batch >= sizes.get(row.layer, 0):
            measured[row.layer], sizes[row.layer] = row.backward_s.value, row.micro_batch
    if len(measured) == len(profile.layers):
        return [measured[x.name] for x in profile.layers]
    if all(x.flops_per_sample > 0 for x in profile.layers):
        return [x.flops_per_sample for x in profile.layers]
    return [float(max(x.param_bytes, 1)) for x in profile.layers]


@dataclass(frozen=True, kw_only=True)
class Tail:
    """Reduction as a function of the last backward of one device.

    The link serves buckets one after another: end_k = max(ready_k, end_{k-1}) + seconds_k. Unrolled, the last
    one ends at max_k(ready_k + S_k) with S_k = Σ_{j≥k} seconds_j; ready_k lies (1 - fraction_k)·backward
    before the device's end. So a device that ends at F delays the step to F + max_k(S_k - (1 -
    fraction_k)·backward): the maximum over devices splits, and each device can be judged alone.
    """

    still_to_come: np.ndarray
    part_after: np.ndarray

    def exposed_s(self, last_backward_s: np.ndarray) -> np.ndarray:
        """Seconds between a device's end and the end of the reduction, by its last backward's seconds.

        Example: one bucket of 3 ms, ready at the end, is exposed for 3 ms whatever the backward takes.
        """
        if not len(self.still_to_come):
            return np.zeros_like(last_backward_s)
        shape = (-1,) + (1,) * last_backward_s.ndim
        after = self.part_after.reshape(shape) * last_backward_s[None]
        return np.maximum((self.still_to_come.reshape(shape) - after).max(axis=0), 0.0)

    @property
    def least_s(self) -> float:
        """Seconds that no backward can hide: the last bucket's."""
        return float(self.still_to_come[-1]) if len(self.still_to_come) else 0.0


def tail(buckets: Sequence[Bucket], seconds: Callable[[int], float]) -> Tail:
    """The tail of `buckets` when `seconds(num_bytes)` is the time of one all-reduce."""
    times = np.array([seconds(b.num_bytes) for b in buckets], dtype=float)
    return Tail(
        still_to_come=times[::-1].cumsum()[::-1],
        part_after=np.array([1 - b.ready for b in buckets], dtype=float),
    )
