"""Measuring the user's model on the devices of a job, each kind on a device of its own, all at the same time.

At the same time, because the devices of one host share its memory and cores in the run as well.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from statistics import median
from typing import Any

import torch
from msgspec.structs import replace
from torch import nn

from evener.core.figures import Curve
from evener.core.fleet import REHEARSED, Fleet, Link
from evener.core.plan import Plan
from evener.core.profile import Profile
from evener.core.seams import Wire
from evener.core.tracebacks import is_out_of_memory
from evener.errors import OutOfMemoryError
from evener.profiling import merge_profiles, profile_model
from evener.profiling.memory import give_back, start_peak
from evener.rehearsal.pacer import Roomy
from evener.runtime.dropout import dropout_keys
from evener.runtime.problem import to_device
from evener.session.meeting import Meeting
from evener.session.planning.additive import UNSEEN, check_adds_up
from evener.session.planning.beside_steps import BesideSteps
from evener.session.planning.decide import check_dataset
from evener.session.recipe import Recipe
from evener.session.request import Request
from evener.session.site import Site, open_site

LARGEST = 1024
LINK_SIZES = (4096, 262_144, 2**20, 8 * 2**20)
LINK_REPEATS = 9


def micro_batch_grid(global_batch: int) -> tuple[int, ...]:
    """The sizes to measure: powers of two up to the global batch. Example: 12 gives (1, 2, 4, 8, 12)."""
    limit = min(global_batch, LARGEST)
    powers = [2**k for k in range(limit.bit_length()) if 2**k <= limit]
    return tuple(dict.fromkeys([*powers, limit]))


def profile_here(recipe: Recipe, site: Site, sizes: tuple[int, ...], budget_s: float) -> Profile:
    """The profile of the recipe's model on this process's device; the model is left as it was."""
    problem, device = recipe.problem, site.torch_device

    def step_loss(model: nn.Module, batch: Any) -> torch.Tensor:
        with torch.autocast(device.type, dtype=recipe.autocast) if recipe.autocast else nullcontext():
            loss, metrics = problem.forward(model, to_device(batch, device))
        if device.type != "cpu":
            [(float(total), float(count)) for total, count in metrics.values()]  # as a run's forward does
        return loss

    with _roomy(recipe, site) as note:
        profile = _profiled(recipe, site, step_loss, sizes, budget_s)
        give_back(device)  # errors of attempts that did not fit hold parameters, which then cannot move
        recipe.model.to("cpu")  # the plan says which part of it the device holds
        give_back(device)
    start_peak(device)  # the run's own peak is still to come
    return replace(profile, note="; ".join(filter(None, (profile.note, note)))) if note else profile


def check_unmeasured(recipe: Recipe, site: Site, plan: Plan) -> str:
    """`check_adds_up` for a run that measures nothing, as its profile or plan was given.

    On this process's device, where the plan has the whole model on one; the model is left as it was, on the
    host. Returns the sentence why nothing was compared, else "".
    """
    if recipe.weight is not None:
        return ""
    parted = plan.owners or any(s.residence for _, _, s in plan.numbered_stages())
    if parted or not plan.is_data_parallel:
        return f"{UNSEEN}: nothing was measured, and no device of the plan holds the whole model"
    device = site.torch_device
    try:
        _move_to(device, recipe, site)
        recipe.loss_to(device)
        with dropout_keys(recipe.model, -1, None):
            return check_adds_up(recipe, device)
    except OutOfMemoryError as e:
        return f"{UNSEEN}: {e.what}"
    finally:
        recipe.model.to("cpu")
        give_back(device)
        start_peak(device)


@contextmanager
def _roomy(recipe: Recipe, site: Site) -> Iterator[str]:
    """Inside, a rehearsed card holds a model that it could not train: measured it is all the same."""
    memory = site.device.memory_bytes
    trained = [p for p in recipe.model.parameters() if p.requires_grad]
    held = sum(p.nbytes for p in recipe.model.parameters()) + sum(p.nbytes for p in trained)
    if site.device.type != REHEARSED or memory is None or held <= memory.value:
        yield ""
        return
    assert isinstance(site.driver, Roomy)
    with site.driver.roomy():
        yield f"measured as if {site.device.name} had room for all of it, as only a rehearsal can"


def _profiled(
    recipe: Recipe,
    site: Site,
    step_loss: Callable[[nn.Module, Any], torch.Tensor],
    sizes: tuple[int, ...],
    budget_s: float,
) -> Profile:
    device = site.torch_device
    beside = BesideSteps(recipe, device) if device.type != "cpu" else None  # runs the model where it is
    _move_to(device, recipe, site)
    recipe.loss_to(device)
    memory = site.device.free_memory_bytes or site.device.memory_bytes
    if device.type != "cpu":
        memory = None  # it says itself what does not fit
    with dropout_keys(recipe.model, -1, None):
        unseen = check_adds_up(recipe, device)
        profile = profile_model(
            model=recipe.model,
            step_loss=step_loss,
            optimizer=recipe.optimizer_to_time,
            batch_of=recipe.batch_of,
            kind=site.device.kind,
            driver=site.driver,
            device=device,
            micro_batches=sizes,
            memory_bytes=int(memory.value) if memory else None,
            budget_s=budget_s,
            name=recipe.name or type(recipe.model).__name__,
            beside=beside,
        )
    return replace(profile, note="; ".join(filter(None, (profile.note, unseen))))


def _move_to(device: torch.device, recipe: Recipe, site: Site) -> None:
    try:
        recipe.model.to(device)
    except Exception as e:
        if not is_out_of_memory(e):
            raise
        held = sum(p.nbytes for p in recipe.model.parameters())
        raise OutOfMemoryError(
            f"{site.device.name} cannot hold the model's parameters, so the model cannot be measured on it",
            numbers=f"{held / 2**30:.3g} GiB of parameters",
            remedy="--profile with a profile that times each layer, or --plan with a plan of several stages",
        ) from e


def profile_together(
    recipe: Recipe, site: Site, meeting: Meeting, request: Request, sizes: tuple[int, ...]
) -> Profile | None:
    """Every kind measured by its first device; the merged profile on the first process, else None.

    DataError at once where the dataset cannot fill one global batch.
    """
    check_dataset(recipe)
    fleet = request.fleet
    names = {d.kind: d.name for d in reversed(fleet.devices)}
    if names[site.device.kind] == site.device.name:
        meeting.put(f"profile/{site.device.name}", profile_here(recipe, site, sizes, request.profile_s))
    if meeting.rank:
        return None
    kinds = dict.fromkeys(d.kind for d in fleet.devices)
    return merge_profiles(tuple(meeting.get(f"profile/{names[kind]}", Profile) for kind in kinds))


def profile_recipe(
    script: str,
    *,
    fleet: Fleet | None,
    rehearse: bool,
    micro_batches: tuple[int, ...] | None,
    seed: int,
    budget_s: float = 60.0,
    report: Callable[[str], None],
) -> Profile:
    """Profile the recipe of `script` on one device of each kind of `fleet`, one after the other, in here.

    Without a fleet: on every kind of device of this host. `report` is told what is being measured.
    """
    from evener.probing import devices_here, host_name
    from evener.session.recipe import load_recipe, with_keys

    devices = fleet.devices if fleet else devices_here(host_name())
    profiles = []
    for device in {d.kind: d for d in reversed(devices)}.values():
        report(f"{script} on {device.kind}")
        recipe = with_keys(load_recipe(script, seed), seed)
        site = open_site(device, rehearse=rehearse, fleet=fleet)
        sizes = micro_batches or micro_batch_grid(recipe.global_batch)
        profiles.append(profile_here(recipe, site, sizes, budget_s))
    return merge_profiles(tuple(profiles))


def measured_links(
    fleet: Fleet, here: str, wire: Wire, wire_among: Callable[[tuple[str, ...]], Wire], device: torch.device
) -> Fleet:
    """The fleet with its hosts' links as groups really sum buffers, the same on every process.

    Inside all hosts at once, then between the first devices of each two hosts in turn. Every curve is the
    inverse of the ring formula in core/collectives, from medians of repeated sums. `wire` is among all,
    `wire_among(devices)` a new one, made by all devices together.
    """
    hosts: dict[str, list[str]] = {}
    for d in fleet.devices:
        hosts.setdefault(d.host, []).append(d.name)
    inside = {(h, h): tuple(names) for h, names in hosts.items() if len(names) > 1}
    between = {(a, b): (hosts[a][0], hosts[b][0]) for i, a in enumerate(hosts) for b in list(hosts)[i + 1 :]}
    wires = {names: wire_among(names) for names in (*inside.values(), *between.values())}
    turns: list[dict[tuple[str, str], tuple[str, ...]]] = [inside]
    for pair, first_two in between.items():
        turns.append({pair: first_two})
    links = []
    for turn in filter(None, turns):
        seconds = torch.zeros(len(turn), len(LINK_SIZES), dtype=torch.float64)
        for row, names in enumerate(turn.values()):
            if here in names:
                taken = [median(_timed_sums(wires[names], size, device)) for size in LINK_SIZES]
                seconds[row] = torch.tensor(taken, dtype=torch.float64) / len(names)  # the others' add up
        wire.all_reduce(seconds, "link times").wait()
        for row, (pair, names) in zip(seconds.tolist(), turn.items(), strict=True):
            links.append(Link(a=pair[0], b=pair[1], curve=_hop_curve(row, len(names))))
    return replace(fleet, links=tuple(links))


def _hop_curve(seconds: list[float], n: int) -> Curve:
    """The curve of one hop of a ring of n, from what whole sums of `LINK_SIZES` took."""
    points: list[tuple[float, float]] = []
    for num_bytes, taken in zip(LINK_SIZES, seconds, strict=True):
        hop_s = taken / (2 * (n - 1))
        points.append((num_bytes / n, max(hop_s, points[-1][1] if points else 1e-9)))
    return Curve(points=tuple(points), source="measured")


def _timed_sums(wire: Wire, num_bytes: int, device: torch.device) -> list[float]:
    buffer = torch.zeros(num_bytes // 4, device=device)  # as gradients lie: on the device, over its backend
    seconds = []
    for _ in range(LINK_REPEATS):
        start = time.monotonic()
        wire.all_reduce(buffer, f"link test of {num_bytes} bytes").wait()
        buffer[:1].tolist()  # on an accelerator waiting only queues: reading waits for the device
        seconds.append(time.monotonic() - start)
    return seconds[LINK_REPEATS // 3 :]  # the first ones open connections
