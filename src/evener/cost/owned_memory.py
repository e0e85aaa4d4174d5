"""Bytes of a device where owners keep state in unequal parts, by what holds them.

             kept whole on every device          kept in parts
optimizer    parameters, gradients               optimiser state
gradients    parameters                          gradients, optimiser state
parameters                                       all three; two neighbouring layers are there whole
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from evener.core.ownership import owned_parts
from evener.core.plan import HELD, Plan
from evener.core.profile import Profile
from evener.cost.memory import ModelBytes, bytes_by_layer


@dataclass(frozen=True, kw_only=True)
class OwnedMemory:
    """Bytes by holder at the peak; `passing` is what is whole for a moment, on its way to or from owners."""

    parameters: float
    gradients: float
    optimizer: float
    buffers: float
    activations: float
    passing: float

    @property
    def total(self) -> float:
        """All of them."""
        return float(sum(getattr(self, f.name) for f in fields(self)))


@dataclass(frozen=True, kw_only=True)
class Owners:
    """Who owns what of each layer: `parts` by device and layer, `level` by layer: 0 is replicated, 1 to 3 is
    what of `HELD` is kept in parts. `bytes` are those of the model, `once` parameters by layer, tied ones
    with the first of their layers, `tied` those of the others.
    """

    bytes: ModelBytes
    once: np.ndarray
    tied: np.ndarray
    level: np.ndarray
    parts: Mapping[str, np.ndarray]

    @property
    def gathers(self) -> np.ndarray:
        """Bytes of parameters by layer that are gathered before use: all that a layer needs, tied or not."""
        return np.where(self.level >= 3, self.once + self.tied, 0.0)

    @cached_property
    def scales(self) -> tuple[float, float, float]:
        """Bytes of gradients, optimiser state and its scratch for a byte of parameters."""
        whole = max(float(self.bytes.parameters[-1]), 1.0)
        sums = (self.bytes.gradients, self.bytes.optimizer, self.bytes.update)
        gradient, optimizer, update = (float(x[-1]) / whole for x in sums)
        return gradient, optimizer, update

    @property
    def gradients(self) -> np.ndarray:
        """Bytes of gradients by layer, those of tied parameters once."""
        return self.once * self.scales[0]

    @cached_property
    def passing(self) -> float:
        """Bytes that are whole for a moment.

        Gradients and parameters kept in parts: of the two neighbouring layers that need most of each, and
        tied gradients until the first of their layers is done. Gradients kept whole: sums on their way.
        """
        sent = np.where(self.level >= 2, self.gradients, 0.0)
        kept = float(np.where(self.level < 2, self.gradients, 0.0).sum())
        underway = 0.0 if self.bytes.counted else min(2.0 * self.bytes.bucket_bytes, kept)
        late = float(np.where(self.level >= 2, self.tied, 0.0).sum()) * self.scales[0]
        return _neighbours(sent) + _neighbours(self.gathers) + underway + late

    def memory(self, device: str, samples: int) -> OwnedMemory:
        """What `device` holds with micro-batches of `samples`; 0 where it takes none.

            part of a layer · (P at level 3, G from 2, O from 1) + the rest whole + activations + passing

        Example: 100 bytes of parameters, as many of gradients, 200 of state, parts 5:3:2, all of two equal
        layers: the first holds 50 + 50 + 100 bytes and, while both layers pass, 100 + 100 more.
        """
        own = self.parts[device]
        gradient, optimizer, update = self.scales
        held = [np.where(self.level >= least, own, 1.0) * self.once for least in (3, 2, 1)]
        acts = self._activations(samples)
        # While owners step nothing passes and no activations are there, but the optimiser's scratch is.
        scratch = float(held[2].sum()) * update - self.passing
        return OwnedMemory(
            parameters=float(held[0].sum()),
            gradients=float(held[1].sum()) * gradient,
            optimizer=float(held[2].sum()) * optimizer,
            buffers=float(self.bytes.buffers[-1]),
            activations=max(acts, scratch),
            passing=self.passing,
        )

    def _activations(self, samples: int) -> float:
        data = self.bytes
        if not samples:
            return 0.0
        first, last = np.int64(0), data.num_layers
        fixed = float(data.kept[-1] + data.transient_fixed[0, last])
        return fixed + samples * float(data.per_sample(first, last, 1))


def owners_of(profile: Profile, data: ModelBytes, plan: Plan) -> Owners:
    """The owners of a plan over the profile's layers; layers that no Ownership names are replicated."""
    named = {o.layer: o for o in plan.owners}
    level = [HELD.index(named[x.name].held) + 1 if x.name in named else 0 for x in profile.layers]
    by_layer = [owned_parts(named[x.name]) if x.name in named else {} for x in profile.layers]
    parts = {d: np.array([row.get(d, 0.0) for row in by_layer]) for d in plan.devices}
    return owners_with(profile, data, np.array(level), parts)


def owners_with(
    profile: Profile, data: ModelBytes, level: np.ndarray, parts: Mapping[str, np.ndarray]
) -> Owners:
    """Owners with these levels by layer and parts by device and layer."""
    once = bytes_by_layer(profile.layers)
    whole = np.array([float(x.param_bytes) for x in profile.layers])
    return Owners(bytes=data, once=once, tied=whole - once, level=level, parts=parts)


def _neighbours(sizes: np.ndarray) -> float:
    """The most that two layers in a row have. Example: 1, 5, 2, 4 is 7."""
    return float((sizes + np.append(sizes[1:], 0.0)).max(initial=0.0))
