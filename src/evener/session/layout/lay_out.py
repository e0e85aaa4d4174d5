"""Who holds which parameters of the user's model under a plan, and the wires between the holders.

plan ──► cut the model along the pipelines this device is in ──► names each stage holds, told to all
     ──► segments (parameters held by the same stages) ──► a group and a wire for each set of holders
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from evener.core.figures import Value
from evener.core.plan import Plan, Stage
from evener.core.seams import Wire
from evener.runtime.batchnorm import wave_layers
from evener.runtime.channels.sums import MOST_DEVICES, ChannelWire
from evener.runtime.dropout import dropout_keys
from evener.runtime.holding import Holding, whole_model
from evener.runtime.owning.held import HeldStages
from evener.runtime.owning.owned import Owned
from evener.runtime.parts import Part
from evener.runtime.ranks import Ranks
from evener.runtime.reducers import reducers_for
from evener.runtime.segments import segments_of
from evener.session.layout.fewer import Apart, open_apart
from evener.session.layout.job_tables import JobTables, open_tables
from evener.session.layout.owning import open_owned, told
from evener.session.layout.residences import homes_of, housed, state_on_disk
from evener.session.layout.scopes import Connect
from evener.session.layout.seat import Seat
from evener.session.layout.sums import gradient_wires
from evener.session.meeting import Meeting
from evener.session.recipe import Recipe
from evener.session.site import Site

_TRACED_SAMPLES = 3  # of the micro-batch that a model is traced with: odd, so that it matches no other size


class HeldNames(Value, frozen=True, kw_only=True):
    """Parameter and buffer names that the stages of one device hold, by stage number.

    `norms` are the names of their BatchNorm layers that take part in waves.
    """

    names: dict[int, tuple[str, ...]]
    norms: dict[int, tuple[str, ...]] = {}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One device's part of a plan: what it holds, its parameters by name, and every name's holders.

    `norms` has all stages' BatchNorm layers that take part in waves; `connect(devices)` is a new wire among
    devices for them, made by all devices of the plan together. `apart` is there where hosts take steps by
    themselves.
    """

    holding: Holding
    parameters: dict[str, nn.Parameter]
    holders: dict[str, tuple[str, ...]]
    norms: dict[int, tuple[str, ...]]
    connect: Connect
    notes: tuple[str, ...] = ()
    tables: JobTables = field(default_factory=JobTables)
    apart: Apart | None = None


def lay_out(seat: Seat) -> Layout:
    """Cut, place and connect. Called by all devices of the plan together, after they joined the group."""
    wire = seat.wire(seat.ranks.devices)
    seat.recipe.loss_to(seat.site.torch_device)
    if seat.plan.is_data_parallel:
        if seat.plan.owners:
            return _in_parts(seat, wire, open_owned(seat, wire))
        return _whole(seat, wire)
    return _in_stages(seat, wire)


def _in_stages(seat: Seat, wire: Wire) -> Layout:
    """Pipelines: a device holds what its stages have. `wire` has the few numbers of a step."""
    recipe, plan, ranks, site = seat.recipe, seat.plan, seat.ranks, seat.site
    tables = open_tables(seat)
    model, stages = recipe.model, {n: (p, s) for n, p, s in plan.numbered_stages()}
    mine = {n: p for n, (p, s) in stages.items() if any(ranks.here in x.devices for x in s.shares)}
    parts, notes = _parts(recipe, plan, site, stages, mine)
    names, norms = _everyones(parts, ranks, seat.meeting)
    devices = {n: tuple(d for x in s.shares for d in x.devices) for n, (_, s) in stages.items()}
    named = dict(model.named_parameters(remove_duplicate=False))
    first_names = {id(p): n for n, p in reversed(list(named.items()))}
    ties = {n: first_names[id(p)] for n, p in named.items()}
    trained = {stage: [n for n in held if n in named] for stage, held in names.items()}
    segments = segments_of(trained, devices, ties, list(named))
    sets = [s.devices for s in segments]
    wires = gradient_wires(seat, sets)
    on_disk = state_on_disk([(part.module, stages[n][1]) for n, part in parts.items()], seat)
    homes = homes_of(parts, site, on_disk)
    owned = None
    if plan.owners:
        modules = {n: part.module for n, part in parts.items()}
        owned = open_owned(seat, wire, HeldStages(segments=segments, modules=modules, wires=wires.among))
    reducers = reducers_for(
        owned.others() if owned else segments,
        ranks.here,
        frozenset(mine),
        named,
        wires.among.__getitem__,
        ranks.world_size,
        homes,
    )
    channel = site.channel(seat.fleet, ranks, seat.meeting.store, rehearse=seat.rehearse)
    holders = _holders(names, devices, ties)
    held = {n: named[n] for n in holders if n in named and ranks.here in holders[n]}
    few = not seat.rehearse and ranks.world_size <= MOST_DEVICES
    quick = ChannelWire(channel, ranks) if few else None
    holding = Holding(
        parts=parts,
        reducers=owned.reducers(reducers) if owned else reducers,
        wire=wire,
        channel=channel,
        quick=quick,
        homes=homes,
        grouped=wires.grouped,
        owned=owned,
    )
    tables.join(reducers, [p.module for p in parts.values()])
    holding = replace(holding, ahead=tables.look_ahead(site.torch_device))
    return Layout(
        holding=holding,
        parameters=held,
        holders=holders,
        norms=norms,
        connect=seat.connect,
        notes=notes + tables.notes + (told(owned) if owned else ()),
        tables=tables,
    )


def _holders(
    names: Mapping[int, Sequence[str]], devices: Mapping[int, Sequence[str]], ties: Mapping[str, str]
) -> dict[str, tuple[str, ...]]:
    """The devices of all stages that hold each name; tied ones under their first."""
    holders: dict[str, tuple[str, ...]] = {}
    for stage in sorted(names):
        for name in names[stage]:
            first = ties.get(name, name)
            holders[first] = tuple(dict.fromkeys((*holders.get(first, ()), *devices[stage])))
    return holders


def _everyones(
    parts: Mapping[int, Part], ranks: Ranks, meeting: Meeting
) -> tuple[dict[int, tuple[str, ...]], dict[int, tuple[str, ...]]]:
    """By stage, the names that it holds and its BatchNorm layers in waves, told by each to all."""
    own = HeldNames(
        names={n: tuple(p.names) for n, p in parts.items()},
        norms={n: _norms(p.module) for n, p in parts.items()},
    )
    meeting.put(f"held/{ranks.here}", own)
    names: dict[int, tuple[str, ...]] = {}
    norms: dict[int, tuple[str, ...]] = {}
    for device in ranks.devices:
        theirs = meeting.get(f"held/{device}", HeldNames)
        names |= theirs.names
        norms |= theirs.norms
    return names, norms


def _whole(seat: Seat, wire: Wire) -> Layout:
    """Data parallelism: every device holds the model whole. `wire` has the few numbers of a step."""
    recipe, plan, ranks, site = seat.recipe, seat.plan, seat.ranks, seat.site
    tables = open_tables(seat)
    apart = open_apart(seat)
    wires = gradient_wires(seat, [] if apart else [ranks.devices])
    model = recipe.model
    number, _, stage = next(x for x in plan.numbered_stages() if ranks.here in x[2].shares[0].devices)
    residing = housed(model, stage, site)
    holding = whole_model(
        model,
        recipe.problem,
        ranks,
        wire,
        sums=wires.among[ranks.devices] if wires.grouped else wire,
        stage=number,
        device=site.torch_device,
        autocast=recipe.autocast_of(stage.precision),
        recompute=stage.recompute,
        residing=residing,
        on_host=site.driver.on_host,
        state=state_on_disk([(model, stage)], seat),
        circle=apart.circle if apart else None,
    )
    tables.join(holding.reducers, [model])
    holding = replace(holding, ahead=tables.look_ahead(site.torch_device), grouped=wires.grouped)
    everything = [n for n, _ in [*model.named_parameters(), *model.named_buffers()]]
    return Layout(
        holding=holding,
        parameters=dict(model.named_parameters()),
        holders=dict.fromkeys(everything, ranks.devices),
        norms={n: _norms(model) for n, _, _ in plan.numbered_stages()},
        connect=seat.connect,
        notes=tables.notes,
        tables=tables,
        apart=apart,
    )


def _in_parts(seat: Seat, wire: Wire, owned: Owned) -> Layout:
    """Data parallelism whose state is held in parts."""
    recipe, plan, ranks, site = seat.recipe, seat.plan, seat.ranks, seat.site
    model = recipe.model
    number, _, stage = next(x for x in plan.numbered_stages() if ranks.here in x[2].shares[0].devices)
    part = Part(
        stage=number,
        module=model,
        problem=recipe.problem,
        device=site.torch_device,
        autocast=recipe.autocast_of(stage.precision),
        recompute=stage.recompute,
    )
    everything = [n for n, _ in [*model.named_parameters(), *model.named_buffers()]]
    return Layout(
        holding=Holding(parts={number: part}, reducers=owned.reducers(), wire=wire, owned=owned),
        parameters=dict(model.named_parameters()),
        holders=dict.fromkeys(everything, ranks.devices),
        norms={n: _norms(model) for n, _, _ in plan.numbered_stages()},
        connect=seat.connect,
        notes=told(owned),
    )


def _norms(module: nn.Module) -> tuple[str, ...]:
    return tuple(layer.name for layer in wave_layers(module))


def _parts(
    recipe: Recipe,
    plan: Plan,
    site: Site,
    stages: Mapping[int, tuple[int, Stage]],
    mine: Mapping[int, int],
) -> tuple[dict[int, Part], tuple[str, ...]]:
    """This device's stages, from one cut of the model for each pipeline it is in."""
    from evener.runtime.cutting import cut  # torch.export loads slowly, and data parallelism cuts nothing

    args, kwargs, _ = recipe.problem.inputs(recipe.batch_of(_TRACED_SAMPLES))
    parts, notes, cuts = {}, [], []
    for pipeline in sorted(set(mine.values())):
        numbers = [n for n, (p, _) in stages.items() if p == pipeline]
        with dropout_keys(recipe.model, -1, None):
            made = cut(recipe.model, [stages[n][1].layers for n in numbers], example=(args, kwargs))
        notes += [note for note in made.notes if note not in notes]
        cuts.append((numbers, made))
    for numbers, made in cuts:  # once all are made: layers on the device could not be cut again on the host
        for number, module in zip(numbers, made.stages, strict=True):
            if number in mine:
                stage = stages[number][1]
                residing = housed(module, stage, site)
                parts[number] = Part(
                    stage=number,
                    module=module,
                    problem=recipe.problem,
                    device=site.torch_device,
                    is_first=number == numbers[0],
                    is_last=number == numbers[-1],
                    ends=made,
                    autocast=recipe.autocast_of(stage.precision),
                    recompute=stage.recompute,
                    residing=residing,
                )
    return parts, tuple(notes)
