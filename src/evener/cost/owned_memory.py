"""Bytes of a device where owners keep state in unequal parts, by what holds them.

             kept whole on every device          kept in parts
optimizer    parameters, gradients               optimiser state
gradients    parameters                          gradients, optimiser state
parameters   (two neighbouring units)            all three

Where memory is counted, a device's peak is at one of two moments:

a layer's backward    held + saved up to the layer + its work + what is gathered around it
owners step           held + the gradients that come back from the host + the optimiser's scratch
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np

from evener.core.ownership import owned_parts, units_of
from evener.core.plan import HELD, Plan
from evener.core.profile import Profile
from evener.cost.memory import ModelBytes, bytes_by_layer


@dataclass(frozen=True, kw_only=True)
class OwnedMemory:
    """Bytes by holder at the peak.

    `passing` is what is whole for a moment, on its way to or from owners, `update` what the optimiser takes
    while it steps; where owners step at the peak there are neither activations nor anything that passes.
    """

    parameters: float
    gradients: float
    optimizer: float
    buffers: float
    activations: float
    passing: float
    update: float = 0.0

    @property
    def total(self) -> float:
        """All of them."""
        return float(sum(getattr(self, f.name) for f in fields(self)))


@dataclass(frozen=True, kw_only=True)
class Owners:
    """Who owns what, by unit: layers in a row that travel together, and each layer without owners alone.

    `starts` is the first layer of each unit, `level` what it keeps in parts: 0 nothing, 1 to 3 as `HELD`;
    `parts` are by device and unit. `once` are bytes of parameters, tied ones with the first of their layers,
    `tied` those of the others. `stays` says which are tied, and so there in a whole forward and backward if
    they are gathered. `rises` has by layer, whatever the samples and for each of them, how far
    memory rises while it runs: all that is saved up to it and its own work, the gradient it makes included.
    """

    bytes: ModelBytes
    starts: np.ndarray
    level: np.ndarray
    parts: Mapping[str, np.ndarray]
    once: np.ndarray
    tied: np.ndarray
    stays: np.ndarray
    rises: tuple[np.ndarray, np.ndarray]

    @property
    def gathers(self) -> np.ndarray:
        """Bytes of parameters by unit that are gathered before use."""
        return np.where(self.level >= 3, self.once, 0.0)

    @cached_property
    def _gathered(self) -> np.ndarray:
        """Bytes that are gathered while each unit runs: it and the next one either way, and all that stay."""
        staying = float(np.where(self.stays, self.gathers, 0.0).sum())
        comes = np.flatnonzero(~self.stays & (self.gathers > 0))
        if not len(comes):
            return np.full(len(self.gathers), staying)
        pairs = _pairs(self.gathers[comes])
        last = np.maximum(np.searchsorted(comes, np.arange(len(self.gathers)), side="right") - 1, 0)
        return np.maximum(pairs[last], pairs[np.maximum(last - 1, 0)]) + staying

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

    @cached_property
    def _late(self) -> float:
        """Tied gradients that wait for the first of their layers."""
        return float(np.where(self.level >= 2, self.tied, 0.0).sum()) * self.scales[0]

    @cached_property
    def _collected(self) -> np.ndarray:
        """Bytes of gradients that a device collects while each unit runs: where layers are small."""
        small = (self.level >= 2) & (self.gradients <= self.bytes.bucket_bytes)
        return np.where(small, self.gradients, 0.0)

    def _passing(self, *, computes: bool) -> float:
        """Bytes that are whole for a moment on a device that computes or only keeps its part.

        Parameters that are gathered: of the two neighbouring units that need most. Gradients that go to
        owners: as much, and tied ones until the first of their layers is done. Gradients that are kept whole:
        sums on their way, as ever.
        """
        sent = np.where(self.level >= 2, self.gradients, 0.0)
        kept = float(np.where(self.level < 2, self.gradients, 0.0).sum())
        buckets = min(2.0 * self.bytes.bucket_bytes, kept)
        if not computes:
            return buckets + float(sent.max(initial=0.0))
        return buckets + float(_pairs(sent).max()) + self._late + float(self._gathered.max())

    def _computing(self, samples: int) -> tuple[float, float]:
        """(activations, what passes) where memory is counted, at the layer where both are most.

        Gradients pass on the host but for that of the layer whose backward runs, which is part of its work,
        and those of its unit where that is small.
        """
        if not samples:
            return 0.0, 0.0
        fixed, each = self.rises
        of_layer = np.searchsorted(self.starts, np.arange(len(fixed)), side="right") - 1
        acts, passing = fixed + samples * each, (self._gathered + self._collected)[of_layer]
        top = int((acts + passing).argmax())
        return float(acts[top]), float(passing[top])

    def memory(self, device: str, samples: int) -> OwnedMemory:
        """What `device` holds with micro-batches of `samples`; 0 where it takes none.

            part of a unit · (P at level 3, G from 2, O from 1) + the rest whole + activations + passing

        Where memory is counted, gradients of level 2 and 3 come back from the host when owners step: with the
        optimiser's scratch that is a peak of its own. Example: 100 bytes of parameters, as many of gradients,
        200 of state, parts 5:3:2, all of two equal units: the first holds 50 + 50 + 100 bytes and, while both
        pass, 100 + 100 more. Counted, with 10 bytes saved and 50 of work a layer and 100 of scratch: 50 + 100
        and, while the last layer runs back, 20 + 50 + 100, or 50 + 50 when owners step: the peak is 320.
        """
        own = self.parts[device]
        gradient, optimizer, update = self.scales
        held = [np.where(self.level >= least, own, 1.0) * self.once for least in (3, 2, 1)]
        gradients = held[1] * gradient
        always = OwnedMemory(
            parameters=float(held[0].sum()),
            gradients=float(gradients.sum()),
            optimizer=float(held[2].sum()) * optimizer,
            buffers=float(self.bytes.buffers[-1]),
            activations=0.0,
            passing=0.0,
        )
        if not self.bytes.counted:
            acts, passing = self._activations(samples), self._passing(computes=samples > 0)
            return replace(always, activations=acts, passing=passing)
        steps = replace(always, update=float(held[2].sum()) * update)
        acts, passing = self._computing(samples)
        there = float(np.where(self.level < 2, gradients, 0.0).sum())
        computes = replace(always, gradients=there, activations=acts, passing=passing)
        return max(steps, computes, key=lambda m: m.total)

    def owned_bytes(self, device: str) -> float:
        """Bytes that `device` keeps of what is in parts. Example: half of 400 bytes of state: 200."""
        own = self.parts[device] * self.once
        scales = (1.0, *self.scales[:2])
        kept = (np.where(self.level >= least, own, 0.0).sum() for least in (3, 2, 1))
        return float(sum(scale * float(x) for scale, x in zip(scales, kept, strict=True)))

    def _activations(self, samples: int) -> float:
        return samples * float(self.bytes.per_sample(np.int64(0), self.bytes.num_layers, 1))


def owners_of(profile: Profile, data: ModelBytes, plan: Plan) -> Owners:
    """The owners of a plan over the profile's layers; layers that no Ownership names are replicated."""
    once = bytes_by_layer(profile.layers)
    named = {o.layer: o for o in plan.owners}
    sizes = {x.name: int(size) for x, size in zip(profile.layers, once, strict=True)}
    ordered = [named[name] for name in sizes if name in named]
    units = units_of(ordered, sizes, data.bucket_bytes)
    unit = {o.layer: k for k, unit in enumerate(units) for o in unit}
    # A layer without parameters runs with the unit before it; tied ones, which stay gathered, with no others.
    starts: list[int] = []
    before: tuple[int, bool] = (-2, False)
    for i, layer in enumerate(profile.layers):
        own = unit.get(layer.name, -1), bool(layer.tied)
        if not starts or (layer.param_bytes and (own[0] < 0 or own != before)):
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
        stays=np.logical_or.reduceat([bool(x.tied) for x in profile.layers], starts),
        rises=(
            _up_to([x.saved_bytes for x in profile.layers], [x.work_bytes for x in profile.layers]),
            _up_to(
                [x.saved_bytes_per_sample for x in profile.layers],
                [x.work_bytes_per_sample for x in profile.layers],
            ),
        ),
    )


def _pairs(sizes: np.ndarray) -> np.ndarray:
    """What each unit and the one behind it have. Example: 1, 5, 2, 4 give 6, 7, 6, 4."""
    return sizes + np.append(sizes[1:], 0.0)


def _up_to(saved: Sequence[int], work: Sequence[int]) -> np.ndarray:
    """By layer, what is saved up to and with it and its own work. Example: 10, 10 and 12, 1: 22 and 21."""
    return np.cumsum(np.array(saved, dtype=float)) + np.array(work, dtype=float)
