"""Bytes of a device where owners keep state in unequal parts, by what holds them.

             kept whole on every device          kept in parts
optimizer    parameters, gradients               optimiser state
gradients    parameters                          gradients, optimiser state
parameters   (two neighbouring units)            all three
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from evener.core.ownership import owned_parts, units_of
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
    """Who owns what, by unit: layers in a row that travel together, and each layer without owners alone.

    `starts` is the first layer of each unit, `level` what it keeps in parts: 0 nothing, 1 to 3 as `HELD`;
    `parts` are by device and unit. `once` are bytes of parameters, tied ones with the first of their layers,
    `tied` those of the others, `largest` the bytes of the largest layer's gradients.
    """

    bytes: ModelBytes
    starts: np.ndarray
    level: np.ndarray
    parts: Mapping[str, np.ndarray]
    once: np.ndarray
    tied: np.ndarray
    largest: float

    @property
    def gathers(self) -> np.ndarray:
        """Bytes of parameters by unit that are gathered before use: all that it needs, tied or not."""
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
        """Bytes of gradients by unit, those of tied parameters once."""
        return self.once * self.scales[0]

    def unit_of(self, layer: int) -> int:
        """The unit that a layer is in."""
        return int(np.searchsorted(self.starts, layer, side="right")) - 1

    @cached_property
    def _late(self) -> float:
        """Tied gradients that wait for the first of their layers."""
        return float(np.where(self.level >= 2, self.tied, 0.0).sum()) * self.scales[0]

    def _passing(self, *, computes: bool) -> float:
        """Bytes that are whole for a moment on a device that computes or only keeps its part.

        Parameters that are gathered: of the two neighbouring units that need most. Gradients that go to
        owners: as much, and tied ones until the first of their layers is done; where memory is counted they
        pass on the host, and those of the layer whose backward runs count. Gradients that are kept whole:
        sums on their way, as ever.
        """
        sent = np.where(self.level >= 2, self.gradients, 0.0)
        if self.bytes.counted:
            passing = min(self.largest, float(sent.sum())) if computes else 0.0
        elif computes:
            passing = _neighbours(sent)
        else:
            passing = float(sent.max(initial=0.0))
        if not self.bytes.counted:
            kept = float(np.where(self.level < 2, self.gradients, 0.0).sum())
            passing += min(2.0 * self.bytes.bucket_bytes, kept)
            passing += self._late if computes else 0.0
        return passing + (_neighbours(self.gathers) if computes else 0.0)

    def memory(self, device: str, samples: int) -> OwnedMemory:
        """What `device` holds with micro-batches of `samples`; 0 where it takes none.

            part of a unit · (P at level 3, G from 2, O from 1) + the rest whole + activations + passing

        Where memory is counted, gradients come back from the host when owners step: they and the optimiser's
        scratch are there without activations. Example: 100 bytes of parameters, as many of gradients, 200 of
        state, parts 5:3:2, all of two equal units: the first holds 50 + 50 + 100 bytes and, while both pass,
        100 + 100 more.
        """
        own = self.parts[device]
        gradient, optimizer, update = self.scales
        held = [np.where(self.level >= least, own, 1.0) * self.once for least in (3, 2, 1)]
        gradients = held[1] * gradient
        later = np.where(self.level >= 2, gradients, 0.0) if self.bytes.counted else np.zeros(len(own))
        passing = self._passing(computes=samples > 0)
        steps = float(later.sum()) + float(held[2].sum()) * update
        return OwnedMemory(
            parameters=float(held[0].sum()),
            gradients=float((gradients - later).sum()),
            optimizer=float(held[2].sum()) * optimizer,
            buffers=float(self.bytes.buffers[-1]),
            activations=max(self._activations(samples), steps - passing),
            passing=passing,
        )

    def owned_bytes(self, device: str) -> float:
        """Bytes that `device` keeps of what is in parts. Example: half of 400 bytes of state: 200."""
        own = self.parts[device] * self.once
        scales = (1.0, *self.scales[:2])
        kept = (np.where(self.level >= least, own, 0.0).sum() for least in (3, 2, 1))
        return float(sum(scale * float(x) for scale, x in zip(scales, kept, strict=True)))

    def _activations(self, samples: int) -> float:
        data = self.bytes
        if not samples:
            return 0.0
        first, last = np.int64(0), data.num_layers
        fixed = float(data.kept[-1] + data.transient_fixed[0, last])
        return fixed + samples * float(data.per_sample(first, last, 1))


def owners_of(profile: Profile, data: ModelBytes, plan: Plan) -> Owners:
    """The owners of a plan over the profile's layers; layers that no Ownership names are replicated."""
    once = bytes_by_layer(profile.layers)
    named = {o.layer: o for o in plan.owners}
    sizes = {x.name: int(size) for x, size in zip(profile.layers, once, strict=True)}
    ordered = [named[name] for name in sizes if name in named]
    units = units_of(ordered, sizes, data.bucket_bytes)
    unit = {o.layer: k for k, unit in enumerate(units) for o in unit}
    # A layer without parameters runs with the unit before it; one whose parameters are tied to an earlier one
    # gathers them for itself.
    starts: list[int] = []
    before = -2
    for i, layer in enumerate(profile.layers):
        own = unit.get(layer.name, -1)
        if not starts or (layer.param_bytes and (own < 0 or own != before)):
            starts.append(i)
        before = own if layer.param_bytes else before
    lead = [named.get(profile.layers[i].name) for i in starts]
    shares = [owned_parts(o) if o else {} for o in lead]
    return owners_with(
        profile,
        data,
        starts=np.array(starts),
        level=np.array([HELD.index(o.held) + 1 if o else 0 for o in lead]),
        parts={d: np.array([row.get(d, 0.0) for row in shares]) for d in plan.devices},
    )


def owners_with(
    profile: Profile,
    data: ModelBytes,
    *,
    starts: np.ndarray,
    level: np.ndarray,
    parts: Mapping[str, np.ndarray],
) -> Owners:
    """Owners with these units, levels by unit and parts by device and unit."""
    once = bytes_by_layer(profile.layers)
    whole = np.array([float(x.param_bytes) for x in profile.layers])
    return Owners(
        bytes=data,
        starts=starts,
        level=level,
        parts=parts,
        once=np.add.reduceat(once, starts),
        tied=np.add.reduceat(whole - once, starts),
        largest=float(np.diff(data.gradients).max(initial=0.0)),
    )


def _neighbours(sizes: np.ndarray) -> float:
    """The most that two units in a row have. Example: 1, 5, 2, 4 give 7."""
    return float((sizes + np.append(sizes[1:], 0.0)).max(initial=0.0))
