"""`evener advise`: the changes that would help most, each with its simulated gain. Never imports torch."""

import json
import sys
from typing import Annotated

import typer

from evener.cli.options import (
    Allow,
    AsJson,
    Batch,
    BatchPerDevice,
    FleetFile,
    KeepAll,
    MemoryMargin,
    MicroBatch,
    Model,
    ModelPrecision,
    ProfileFile,
    ShapesWanted,
)
from evener.cli.plan import job_from, solved, world_of
from evener.core.catalogue import read_fleet
from evener.planner.advise import counsel
from evener.planner.tries import limited, tries_of
from evener.report.counsel import counsel_object, counsel_text

MOST_TRIES = 48


def advise(
    fleet: FleetFile,
    profile: ProfileFile = None,
    batch: Batch = None,
    model: Model = None,
    precision: ModelPrecision = "float32",
    batch_per_device: BatchPerDevice = None,
    micro_batch: MicroBatch = None,
    memory_margin: MemoryMargin = 0.1,
    keep_all: KeepAll = False,
    shapes: ShapesWanted = "auto",
    allow: Allow = None,
    consider: Annotated[
        list[str] | None, typer.Option(help="Also try one more card of this KIND. May be repeated.")
    ] = None,
    most: Annotated[int, typer.Option(min=1, help="How many changes to tell.")] = 3,
    everything: Annotated[bool, typer.Option("--all", help="Tell also what would not help.")] = False,
    as_json: AsJson = False,
) -> None:
    """Tell the three changes that would help most: a link, memory, a card, MIG slices, a setting.

    Each is planned and played in the simulator. It comes with its gain in samples per second, with what a
    step is made of now and then on the device that waits least, and with what the sum assumes.
    """
    devices = read_fleet(fleet)
    job = job_from(
        devices,
        batch,
        batch_per_device,
        micro_batch=micro_batch,
        memory_margin=memory_margin,
        keep_all=keep_all,
        allow=tuple(allow or ()),
    )
    world = world_of(devices, profile, model, precision, job)
    other = {"bfloat16"} if model is not None and precision == "float32" else set()
    precisions = {p: world_of(devices, None, model, p, job) for p in other if _has(devices, p)}
    everyone = tries_of(world, job, shapes, consider=consider or (), precisions=precisions)
    tries, left = limited(everyone, MOST_TRIES)
    found = counsel(world, job, shapes, tries, solved, most=most)
    stream = sys.stderr if as_json else sys.stdout
    print(counsel_text(found, everything=everything), end="", file=stream)
    if left:
        print(f"note: {left} of {len(everyone)} changes were not tried", file=stream)
    if as_json:
        print(json.dumps({**counsel_object(found), "not_tried": left}))


def _has(devices, precision: str) -> bool:
    """Whether every device of the fleet has a rate in that precision: the planner refuses others."""
    return all(precision in d.flops for d in devices.devices)
