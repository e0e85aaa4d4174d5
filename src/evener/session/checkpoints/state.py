"""The state of a job between two steps, device by device: for checkpoints, and for those who take over.

Every tensor of the user's model has holders (the devices whose stages have it) and one of them gives it away.
BatchNorm's statistics, where each device normalises by itself, differ between holders: each gives its own.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from evener import __version__
from evener.errors import StateError
from evener.runtime.checkpoints.folder import Checkpoint
from evener.runtime.checkpoints.manifest import FORMAT, Manifest, Position, TensorInfo, model_id
from evener.runtime.checkpoints.randomness import rng_state, set_rng_state
from evener.runtime.checkpoints.shards import bytes_of, info_of
from evener.runtime.owning.state import export_owned, import_owned
from evener.runtime.ranks import Ranks
from evener.runtime.state import export_state, import_state, owners
from evener.runtime.tables.layer import table_layers
from evener.runtime.tables.saving import export_table, import_table
from evener.session.checkpoints.fewer_state import export_apart, import_apart, own_group_state
from evener.session.checkpoints.saver import Own
from evener.session.checkpoints.tensors import saved_tensors
from evener.session.loop.steps import Steps


class JobState:
    """The state of `steps` as a `Saver` takes it."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    @property
    def ranks(self) -> Ranks:
        return self._steps.ranks

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._steps.optimizer

    def own(self) -> Own:
        own = own_of(view_of(self._steps))
        if self._steps.layout.holding.owned:
            own.tensors.update(export_owned(self._steps.layout.holding.owned))
        if self._steps.meetings:
            more, moved = export_apart(self._steps.meetings, held_tensors(self._steps), self.optimizer)
            own = replace(own, tensors=own.tensors | more, moved_by_forwards=own.moved_by_forwards | moved)
        return self._with_files(own)

    def _with_files(self, own: Own) -> Own:
        leads, on_disk = self._steps.ranks.rank == 0, self._steps.layout.holding.homes.state
        with ExitStack() as held:  # should one table's disk be full, the others go on as well
            if on_disk:  # read when its turn comes: memory has no room for a copy of all
                on_disk.reading.acquire()
                held.callback(on_disk.reading.release)
                own.later.update(on_disk.later(own.tensors))
                own = replace(own, tensors={n: t for n, t in own.tensors.items() if n not in own.later})
            for table in self._steps.layout.tables.tables:
                exported = export_table(table, leads=leads)
                held.callback(exported.release)
                own.tensors.update(exported.tensors)
                own.later.update(exported.later)
                own.spared.update(exported.spared)
            return replace(own, release=held.pop_all().close)

    def manifest(self) -> Manifest:
        steps = self._steps
        return Manifest(
            format=FORMAT,
            number=0,
            position=position_of(steps),
            optimizer=type(steps.optimizer).__name__,
            model_id=model_id(infos_of(steps.recipe.model)),
            shards=(),
            loss_scale=steps.loss_scale.state if steps.loss_scale else None,
            tied=tied_names(steps.recipe.model),
            written_by=f"evener {__version__}",
        )


@dataclass(frozen=True, kw_only=True)
class View:
    """What one device sees of a job's state: all names and their holders, and the tensors that it holds.

    `parts` is this device's part of the samples by name. `leaders` has, by layer, the one device with the
    statistics of all waves; those of layers in `pooled` are otherwise the same on all holders. `givers` are
    those whose state counts as the job's, where it is not the same on all.
    """

    model: nn.Module
    held: Mapping[str, Tensor]
    holders: Mapping[str, tuple[str, ...]]
    ranks: Ranks
    optimizer: torch.optim.Optimizer
    device: torch.device
    parts: Mapping[str, float]
    leaders: Mapping[str, str] = field(default_factory=dict)
    pooled: frozenset[str] = frozenset()
    givers: tuple[str, ...] = ()


def view_of(steps: Steps) -> View:
    """The state of a job as this device sees it."""
    owned = steps.layout.holding.owned
    apart = set(owned.names) if owned else ()
    return View(
        model=steps.recipe.model,
        held={name: t for name, t in held_tensors(steps).items() if name not in apart},
        holders=holders_of(steps),
        ranks=steps.ranks,
        optimizer=steps.optimizer,
        device=steps.site.torch_device,
        parts=steps.parts(),
        leaders=steps.scopes.leaders,
        pooled=steps.scopes.pooled,
        givers=steps.meetings.apart.exchange.groups[0] if steps.meetings else (),
    )


def own_of(view: View) -> Own:
    """The tensors that this device is to write: references, except generators' states."""
    here, held, givers = view.ranks.here, view.held, _givers(view)
    mine = [name for name in held if givers[name] == here]
    tensors = export_state(held, view.optimizer, mine)
    apart = [name for name in _apart(view) if name in held]
    tensors |= {f"statistics/{here}/{name}": held[name].detach() for name in apart}
    tensors |= {f"rng/{here}/{name}": state for name, state in rng_state(view.device).items()}
    parameters = {f"model/{name}" for name, t in held.items() if isinstance(t, nn.Parameter)}
    moved = {n for n in tensors if not n.startswith("optimizer/") and n not in parameters}
    return Own(
        tensors=tensors,
        moved_by_forwards=frozenset(moved),
        statistics={name: view.parts.get(name, 0.0) for name in apart},
    )


def held_tensors(steps: Steps) -> dict[str, Tensor]:
    """Parameters and persistent buffers that this device holds, each under the first of the user's names.

    The leading device also has what no stage holds: parameters that the model never uses.
    """
    every, first = saved_tensors(steps.recipe.model), _first_names(steps.recipe.model)
    live = {first.get(n, n): t for part in steps.layout.holding.parts.values() for n, t in part.names.items()}
    holders = holders_of(steps)
    return {n: live.get(n, t) for n, t in every.items() if steps.ranks.here in holders[n]}


def holders_of(steps: Steps) -> dict[str, tuple[str, ...]]:
    """Who holds each parameter and persistent buffer of the user's model; the same on every device."""
    first = _first_names(steps.recipe.model)
    held: dict[str, dict[str, None]] = {}
    for name, devices in steps.layout.holders.items():
        held.setdefault(first.get(name, name), {}).update(dict.fromkeys(devices))
    leader = steps.ranks.devices[:1]
    return {n: tuple(held.get(n, {})) or leader for n in saved_tensors(steps.recipe.model)}


def position_of(steps: Steps) -> Position:
    """Where in its data the job is."""
    return Position(
        step=steps.number,
        samples_seen=steps.samples_seen,
        seed=steps.samples.seed,
        global_batch=steps.plan.global_batch,
        dataset_size=len(steps.recipe.dataset),
        shuffle=steps.samples.shuffle,
    )


def restore(steps: Steps, checkpoint: Checkpoint) -> list[str]:
    """Put this device where `checkpoint` was, whatever plan and devices wrote it; what is not the same.

    Raises StateError where the checkpoint is of another model, optimiser or data order; nothing has changed
    then, but where state lies on disk what came before what does not fit.
    """
    manifest, here = checkpoint.manifest, steps.ranks.here
    check_model(checkpoint, steps.recipe.model, type(steps.optimizer).__name__)
    check_position(manifest.position, position_of(steps), checkpoint)
    owned = steps.layout.holding.owned
    held, on_disk = view_of(steps).held, steps.layout.holding.homes.state
    for names in [[n] for n in held] if on_disk else [list(held)]:  # one by one where memory has no room
        state = read_state(checkpoint, names, here) | own_group_state(steps.meetings, checkpoint)
        import_state(state, {n: held[n] for n in names}, steps.optimizer)
        if on_disk:
            on_disk.adopt(steps.optimizer, held[names[0]])
    if owned:
        import_owned(owned, lambda names: read_state(checkpoint, list(names), here))
    for table in steps.layout.tables.tables:
        import_table(table, checkpoint)
    steps.samples_seen, steps.number = manifest.position.samples_seen, manifest.position.step
    if steps.loss_scale and manifest.loss_scale:
        steps.loss_scale.restore(manifest.loss_scale)
    said = import_apart(steps.meetings, checkpoint)
    return said + restore_generators(checkpoint, here, steps.site.torch_device)


def restore_generators(checkpoint: Checkpoint, here: str, device: torch.device) -> list[str]:
    """Put this process's generators where those of the device `here` were; a sentence where it had none."""
    prefix = f"rng/{here}/"
    random = checkpoint.read([n for n in checkpoint.manifest.tensors if n.startswith(prefix)])
    if not any(n.startswith("rng/") for n in checkpoint.manifest.tensors):
        return [f"{checkpoint.path.name} was imported: the order of samples and all generators begin anew"]
    if not random:
        return [f"{here} was not there when {checkpoint.path.name} was written: its generators begin anew"]
    set_rng_state({n.removeprefix(prefix): t for n, t in random.items()}, device)
    return []


def read_state(checkpoint: Checkpoint, names: list[str], here: str | None = None) -> dict[str, Tensor]:
    """The state of the tensors `names` for `import_state`.

    BatchNorm's statistics that each device had of its own are those of the device `here`, or, where it had
    none, their mean by samples (whole numbers: the largest).
    """
    wanted = set(names)
    keys = []
    for key in checkpoint.manifest.wholes:
        kind, _, rest = key.partition("/")
        name = rest.rpartition("/")[0] if kind == "optimizer" else rest
        if kind in ("model", "optimizer") and name in wanted:
            keys.append(key)
    state = checkpoint.read(keys)
    state = {key: state[key] for key in keys}  # in the model's own order
    shards = [s for s in checkpoint.manifest.shards if s.statistics]
    for name in {n for s in shards for n in s.statistics if n in wanted}:
        parts = {s.device: s.statistics[name] for s in shards if name in s.statistics}
        if here in parts:
            key = f"statistics/{here}/{name}"
            state[f"model/{name}"] = checkpoint.read([key])[key]
        else:
            values = checkpoint.read([f"statistics/{device}/{name}" for device in parts])
            state[f"model/{name}"] = _mean({d: values[f"statistics/{d}/{name}"] for d in parts}, parts)
    return state


def check_model(checkpoint: Checkpoint, model: nn.Module, optimizer: str | None) -> None:
    """StateError that lists how model and optimiser of `checkpoint` differ from those at hand.

    One that was imported may have a tied tensor under several of its names, with the same values.
    """
    manifest, where, here = checkpoint.manifest, checkpoint.path, infos_of(model)
    there = {n: i for n, i in manifest.wholes.items() if n.startswith("model/")}
    for name, first in tied_names(model).items():
        twice = [n for n in (f"model/{name}", f"model/{first}") if n in there]
        if len(twice) == 2 and np.array_equal(*map(bytes_of, checkpoint.read(twice).values())):
            del there[twice[0]]
    differences = [
        *(f"{n[6:]} is only in the checkpoint" for n in there if n not in here),
        *(f"{n[6:]} is only in the model" for n in here if n not in there),
        *(f"{n[6:]} is {there[n]} there, {here[n]} here" for n in here if n in there and here[n] != there[n]),
    ]
    if differences:
        raise StateError(
            f"the checkpoint {where} is of another model",
            numbers="; ".join(differences[:8])
            + (f"; {len(differences) - 8} more" if differences[8:] else ""),
            remedy="the script that it was made with; --weights takes parts of a model's weights",
        )
    if optimizer is not None and manifest.optimizer not in ("", optimizer):
        raise StateError(
            f"the checkpoint {where} was made with another optimiser",
            numbers=f"{manifest.optimizer} there, {optimizer} here",
            remedy="the same optimiser, or --weights, which takes no optimiser state",
        )


def infos_of(model: nn.Module) -> dict[str, TensorInfo]:
    """Names, shapes and dtypes of what a checkpoint has of `model`, tables that lie elsewhere among them."""
    found = {f"model/{name}": info_of(name, tensor) for name, tensor in saved_tensors(model).items()}
    for table in (layer.table for layer in table_layers(model)):
        row = info_of(table.name, torch.empty(0, dtype=table.dtype))
        shape = (table.num_rows, table.dim)
        found[f"model/{table.name}.weight"] = TensorInfo(dtype=row.dtype, shape=shape)
    return found


def partly_seen(steps: Steps) -> tuple[str, ...]:
    """Statistics held here that lack waves which another device has all of."""
    led_elsewhere = {layer for layer, leader in steps.scopes.leaders.items() if leader != steps.ranks.here}
    names = _statistic_names(steps.recipe.model)
    return tuple(name for name in names if name.rpartition(".")[0] in led_elsewhere)


def _givers(view: View) -> dict[str, str]:
    """Which device gives each tensor away: the leader of a wave its statistics, else by bytes."""
    every = saved_tensors(view.model)
    sizes = {name: t.numel() * t.element_size() for name, t in every.items()}
    givers = owners(view.holders, view.givers or view.ranks.devices, sizes)
    for name in _statistic_names(view.model):
        layer = name.rpartition(".")[0]
        if layer in view.leaders:
            givers[name] = view.leaders[layer]
    return givers


def _apart(view: View) -> list[str]:
    """Statistics that several devices hold and that nothing makes the same."""
    return [
        name
        for name in _statistic_names(view.model)
        if len(view.holders.get(name, ())) > 1 and name.rpartition(".")[0] not in view.pooled
    ]


def _statistic_names(model: nn.Module) -> list[str]:
    names = [
        f"{path}.{key}" if path else key
        for path, module in model.named_modules()
        if isinstance(module, _BatchNorm)
        for key, _ in module.named_buffers(recurse=False)
    ]
    kept = saved_tensors(model)
    return [name for name in names if name in kept]


def _first_names(model: nn.Module) -> dict[str, str]:
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    first = {id(t): name for name, t in reversed(named)}
    return {name: first[id(t)] for name, t in named}


def tied_names(model: nn.Module) -> dict[str, str]:
    """Other names of persistent tensors, each with the first. Example: {"head.weight": "embed.weight"}."""
    kept = model.state_dict()
    return {n: first for n, first in _first_names(model).items() if n != first and n in kept}


def _mean(values: Mapping[str, Tensor], parts: Mapping[str, float]) -> Tensor:
    some = next(iter(values.values()))
    if not some.is_floating_point():
        return max(values.values(), key=lambda t: int(t.sum()))
    whole = sum(parts.values())
    mean = sum((values[d].double() * (parts[d] / whole) for d in values if parts[d]), some.double() * 0)
    return mean.to(some.dtype)


def check_position(there: Position, here: Position, checkpoint: Checkpoint) -> None:
    """StateError where the samples of `there` do not come in the order of `here`; before the first all do."""
    if there.samples_seen == 0:
        return
    words = {
        "seed": "--seed {}",
        "global_batch": "--batch {}",
        "dataset_size": "a dataset of {} samples",
        "shuffle": "shuffle={}",
    }
    different = [k for k in words if getattr(there, k) != getattr(here, k)]
    if different:
        raise StateError(
            f"the run of {checkpoint.path} takes its samples in another order than this one",
            numbers=", ".join(f"{k} {getattr(there, k)} there, {getattr(here, k)} here" for k in different),
            remedy=", ".join(words[k].format(getattr(there, k)) for k in different)
            + "; or --weights, which begins the data anew",
        )
