"""Changes that may help a job, each as a world and a job to plan: links, memory, cards, slices, settings."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from msgspec.structs import replace as changed_job

from evener.core.catalogue import catalogue
from evener.core.fleet import Device, Fleet, Link
from evener.core.job import Job, Shapes
from evener.planner.slices import card_of, partitions
from evener.planner.what_if import World, changed

Sort = Literal["link", "memory", "card", "slices", "setting"]
_LEAST_FASTER = 2.0
_MOST_PARTITIONS = 4


@dataclass(frozen=True, kw_only=True)
class Try:
    """One change: in words, of which sort, and what to plan. `about` names what it changes.

    `make` builds the world when the change is tried; its errors say why it cannot be. `assumed` is what it
    takes for granted.
    """

    change: str
    sort: Sort
    about: str
    make: Callable[[], World]
    job: Job
    shapes: Shapes
    assumed: tuple[str, ...] = ()


def tries_of(
    world: World,
    job: Job,
    shapes: Shapes,
    *,
    consider: Sequence[str] = (),
    precisions: dict[str, World] | None = None,
) -> tuple[Try, ...]:
    """Everything to try, in no order of merit.

    Each link twice as fast (Ethernet: the next kind of at least twice the rate), twice the memory of a device
    of each kind and host, one more card of each kind of the fleet and of `consider` on each host, each
    card in slices and slices as one card, and the settings. `precisions` are the same fleet with a profile in
    another precision.
    """
    made: list[Try] = []

    def add(change: str, sort: Sort, about: str, *assumed: str) -> None:
        made.append(
            Try(
                change=change,
                sort=sort,
                about=about,
                make=lambda: changed(world, change),
                job=job,
                shapes=shapes,
                assumed=assumed,
            )
        )

    for link in world.fleet.links:
        add(*_better(link))
    for device in _one_of_each(world.fleet):
        if device.memory_bytes is not None:
            assumed = "a device with twice the memory is as fast"
            add(f"memory {device.name} x2", "memory", f"memory of {device.kind} on {device.host}", assumed)
    hosts = dict.fromkeys(d.host for d in world.fleet.devices)
    for kind in dict.fromkeys([*(d.kind for d in world.fleet.devices), *consider]):
        for host in hosts:
            assumed = f"{host} has a slot, power and air for it, on the links of the host"
            add(f"add {kind} {host}", "card", "one more card", assumed)
    for change, about in _slice_changes(world.fleet):
        add(change, "slices", about)
    return (*made, *_settings(world, job, shapes, precisions or {}))


def _one_of_each(fleet: Fleet) -> tuple[Device, ...]:
    seen: dict[tuple[str, str], Device] = {}
    for device in fleet.devices:
        seen.setdefault((device.kind, device.host), device)
    return tuple(seen.values())


def _better(link: Link) -> tuple[str, Sort, str, str]:
    """The change that makes a link better, and what it assumes."""
    about = f"{link.a} - {link.b}"
    better = _next_ethernet(link.kind)
    if better is not None:
        assumed = f"{better} at the published rate, less an assumed part"
        return f"link {link.a} {link.b} {better}", "link", about, assumed
    return f"link {link.a} {link.b} x2", "link", about, "twice the rate and half the latency of the link"


def _next_ethernet(kind: str) -> str | None:
    """The slowest Ethernet of the catalogue of at least twice the rate. Example: 1 Gbit/s → 2.5 Gbit/s."""
    lines = [x for x in catalogue().links if x.name.endswith("Ethernet")]
    now = next((x for x in lines if kind.casefold() in (n.casefold() for n in (x.name, *x.aliases))), None)
    if now is None:
        return None
    least = _LEAST_FASTER * now.gb_per_s * now.reaches
    faster = [x for x in lines if x.gb_per_s * x.reaches >= least]
    return min(faster, key=lambda x: x.gb_per_s).name if faster else None


def _slice_changes(fleet: Fleet) -> Iterator[tuple[str, str]]:
    for device in _one_of_each(fleet):
        for way in partitions(device.kind)[:_MOST_PARTITIONS]:
            yield f"split {device.name} {' '.join(s.name for s in way)}", f"slices of {device.name}"
    of_card: dict[tuple[str, str], list[str]] = {}
    for device in fleet.devices:
        card = card_of(device.kind)
        if card is not None:
            of_card.setdefault((card, device.host), []).append(device.name)
    for names in of_card.values():
        if len(names) > 1:
            yield f"merge {' '.join(names)}", f"slices on {names[0].partition('/')[0]}"


def _settings(world: World, job: Job, shapes: Shapes, precisions: dict[str, World]) -> Iterator[Try]:
    def setting(change: str, *assumed: str, of: World = world, shapes: Shapes = shapes, **fields) -> Try:
        return Try(
            change=change,
            sort="setting",
            about=change,
            make=lambda: of,
            job=changed_job(job, **fields),
            shapes=shapes,
            assumed=assumed,
        )

    if job.batch_per_device is not None:
        yield setting("no split of your own", batch_per_device=None)
    if job.micro_batch is not None:
        yield setting("no micro-batch of your own", micro_batch=None)
    if job.keep_all:
        yield setting("devices may be left out (without --keep-all)", keep_all=False)
    several = len(world.fleet.devices) > 1 and bool(world.profile.timings)
    if several and shapes != "all" and job.batch_per_device is None and not job.keep_all:
        yield setting("--shapes all: pipelines and shared stages too", shapes="all")
    if job.memory_margin > 0.05:
        half = job.memory_margin / 2
        words = f"--memory-margin {half:g}"
        yield setting(words, "less memory is left for what nobody counted", memory_margin=half)
    for precision, other in precisions.items():
        yield setting(f"--precision {precision}", "the result is not that of float32", of=other)
    if job.batch_per_device is None:
        twice = replace(world, batch=world.batch * 2)
        yield setting("--batch twice as large", "another batch is another training: half the steps", of=twice)


def limited(tries: Sequence[Try], most: int) -> tuple[tuple[Try, ...], int]:
    """The first `most` tries and how many were left out, each sort in turn, so that none goes missing."""
    by_sort: dict[str, list[Try]] = {}
    for one in tries:
        by_sort.setdefault(one.sort, []).append(one)
    rounds = [(place, one) for rows in by_sort.values() for place, one in enumerate(rows)]
    kept = [one for _, one in sorted(rounds, key=lambda row: row[0])][:most]
    return tuple(kept), len(tries) - len(kept)
