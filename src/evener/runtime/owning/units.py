"""Which values of a model lie together in one flat buffer, and which of them each device owns.

    blocks.0   weight ────────────────── bias ──      the parameters of a unit, laid end to end
    owners     a a a a a a a a a b b b b b c c c      parts 9, 5, 3: cut anywhere, also inside a parameter

An optimiser that needs whole parameters gets them whole: then the parameters are laid owner by owner. Where
pipelines cut the model, a unit is of one segment: its parameters are held by the same stages, and only the
devices of these know of it.
"""

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from evener.core.buckets import BUCKET_BYTES
from evener.core.layers import FoundLayer, find_layers
from evener.core.ownership import check_owners, owned_spans, units_of
from evener.core.plan import Ownership, Plan
from evener.errors import PlanMismatchError
from evener.runtime.segments import Segment, Stages

Span = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Unit:
    """Parameters of one dtype that are handed over together; `spans` has by holder what it owns of them.

    `stages` are those that hold it.

    `stays` where other layers than its own need it too (tied weights, tensors of the model itself): it is
    then there from the beginning of a forward to the end of its backward.
    """

    number: int
    layers: tuple[str, ...]
    named: dict[str, nn.Parameter]
    spans: dict[str, Span]
    stages: Stages
    stays: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.named.values())).dtype

    @property
    def count(self) -> int:
        """Values in all."""
        return sum(p.numel() for p in self.named.values())

    @property
    def num_bytes(self) -> int:
        return self.count * self.dtype.itemsize

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes by owner."""
        return {d: (b - a) * self.dtype.itemsize for d, (a, b) in self.spans.items()}

    def places(self) -> Iterator[tuple[str, nn.Parameter, Span]]:
        """(name, parameter, where its values lie in the flat buffer)."""
        edges = itertools.accumulate((p.numel() for p in self.named.values()), initial=0)
        for (name, p), place in zip(self.named.items(), itertools.pairwise(edges), strict=True):
            yield name, p, place

    def pieces_of(self, device: str) -> Iterator[tuple[str, nn.Parameter, Span]]:
        """(name, parameter, which of the parameter's own values `device` owns), where it owns any."""
        first, last = self.spans[device]
        for name, p, (start, end) in self.places():
            low, high = max(first, start), min(last, end)
            if low < high:
                yield name, p, (low - start, high - start)

    def owners(self) -> tuple[str, ...]:
        """The devices that own some of it."""
        return tuple(d for d, (a, b) in self.spans.items() if b > a)


def units_of_model(
    model: nn.Module,
    plan: Plan,
    *,
    segments: Sequence[Segment] = (),
    whole: Collection[str] = (),
    frozen: bool = False,
    limit: float = BUCKET_BYTES,
) -> tuple[Unit, ...]:
    """The units of `model` under the plan's owners, in the order of its layers, of up to `limit` bytes.

    `segments` are those of a plan that cuts the model. Parameters named in `whole` are not cut. Frozen ones,
    which have no state, are only in it with `frozen`. Raises PlanMismatchError for owners of unknown layers
    or devices, and for layers that have none where every device holds all of the model.
    """
    layers = {layer.name: layer for layer in find_layers(model)}
    check_owners(plan, list(layers))
    own = _own_parameters(model, layers, frozen=frozen)
    owners = {o.layer: o for o in plan.owners}
    left = [name for name, held in own.items() if held and name not in owners]
    if left and plan.is_data_parallel:
        raise PlanMismatchError(
            f"the plan's owners leave out {', '.join(left[:8])}",
            numbers=f"{len(left)} of {sum(map(bool, own.values()))} layers with parameters",
            remedy="an Ownership for every layer with parameters",
        )
    shared = _shared(layers, own)
    alone = shared | {name for name, layer in layers.items() if not layer.whole and layer.name in owners}
    ordered = [owners[name] for name in layers if name in owners]
    units: list[Unit] = []
    for segment in reversed(segments or (whole_segment(model, plan),)):  # else later layers are first
        names = set(segment.names)
        held = {name: {n: p for n, p in named.items() if n in names} for name, named in own.items()}
        sizes = {layer: sum(p.nbytes for p in named.values()) for layer, named in held.items()}
        grouped = [part for unit in units_of(ordered, sizes, limit) for part in _apart(unit, alone)]
        keepers = _whole_owners(grouped, held, whole, segment.devices)
        for group in grouped:
            named = {n: p for o in group for n, p in held[o.layer].items()}
            for is_whole, dtype in dict.fromkeys((n in whole, p.dtype) for n, p in named.items()):
                same = {n: p for n, p in named.items() if (n in whole, p.dtype) == (is_whole, dtype)}
                same, spans = _laid(same, group[0], segment.devices, keepers if is_whole else {})
                units.append(
                    Unit(
                        len(units),
                        tuple(o.layer for o in group),
                        same,
                        spans,
                        segment.stages,
                        stays=any(o.layer in alone for o in group),
                    )
                )
    return tuple(units)


def whole_segment(model: nn.Module, plan: Plan) -> Segment:
    """All of `model`, as every device of a data-parallel plan holds it."""
    stages = frozenset(number for number, _, _ in plan.numbered_stages())
    return Segment(stages, plan.devices, tuple(name for name, _ in model.named_parameters()))


def _own_parameters(
    model: nn.Module, layers: Mapping[str, FoundLayer], *, frozen: bool
) -> dict[str, dict[str, nn.Parameter]]:
    """By layer, its parameters under the user's names; a tied one belongs to the first layer that has it."""
    first = {id(p): name for name, p in model.named_parameters()}
    seen: set[int] = set()
    own: dict[str, dict[str, nn.Parameter]] = {}
    for name, layer in layers.items():
        found = layer.module.parameters(recurse=layer.whole)
        mine = {first[id(p)]: p for p in found if id(p) not in seen and (frozen or p.requires_grad)}
        seen |= {id(p) for p in mine.values()}
        own[name] = mine
    return own


def _shared(layers: Mapping[str, FoundLayer], own: Mapping[str, Mapping[str, nn.Parameter]]) -> set[str]:
    """Layers whose parameters another layer has too."""
    home = {id(p): name for name, held in own.items() for p in held.values()}
    uses = [
        (name, home.get(id(p)))
        for name, layer in layers.items()
        for p in layer.module.parameters(recurse=layer.whole)
    ]
    return {there for name, there in uses if there is not None and there != name}


def _apart(unit: Sequence[Ownership], alone: Collection[str]) -> list[list[Ownership]]:
    """The unit, cut so that what stays gathered is in none with what is let go."""
    return [list(run) for _, run in itertools.groupby(unit, lambda o: o.layer in alone)]


def _whole_owners(
    units: Sequence[Sequence[Ownership]],
    own: Mapping[str, Mapping[str, nn.Parameter]],
    whole: Collection[str],
    devices: Sequence[str],
) -> dict[str, str]:
    """Which device keeps each parameter that is not cut: the largest first, to whom most is still owed."""
    owed = dict.fromkeys(devices, 0.0)
    sizes: dict[str, int] = {}
    able: dict[str, list[str]] = {}
    for owner in (o for unit in units for o in unit):
        total = sum(owner.parts.values())
        for name, p in own[owner.layer].items():
            if name in whole:
                sizes[name] = p.numel() * p.element_size()
                able[name] = [d for d in devices if owner.parts.get(d)]
                for device, part in owner.parts.items():
                    owed[device] += sizes[name] * part / total
    found: dict[str, str] = {}
    for name in sorted(sizes, key=lambda n: (-sizes[n], n)):
        found[name] = max(able[name], key=lambda d: owed[d])
        owed[found[name]] -= sizes[name]
    return found


def _laid(
    named: dict[str, nn.Parameter], owner: Ownership, devices: Sequence[str], keepers: Mapping[str, str]
) -> tuple[dict[str, nn.Parameter], dict[str, Span]]:
    """The parameters in the order in which they lie, and each device's span of them."""
    count = sum(p.numel() for p in named.values())
    if not keepers:
        if not any(owner.parts.get(d) for d in devices):
            raise PlanMismatchError(
                f"none of the owners of {owner.layer} holds {', '.join(list(named)[:8])}",
                numbers=f"owners {', '.join(owner.parts)}; held by {', '.join(devices)}",
                remedy="a part for one of those that hold it",
            )
        return named, owned_spans(owner, devices, count)
    order = sorted(named, key=lambda n: devices.index(keepers[n]))
    held = [sum(named[n].numel() for n in order if keepers[n] == d) for d in devices]
    edges = itertools.accumulate(held, initial=0)
    return {n: named[n] for n in order}, dict(zip(devices, itertools.pairwise(edges), strict=True))
