"""`evener train`: one process per device, one model, one report."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evener.cli.options import (
    SERVED_AT,
    Adapt,
    AsJson,
    BatchPerDevice,
    CheckpointEvery,
    Compress,
    CopyEvery,
    Devices,
    Elastic,
    Faults,
    FewerExchanges,
    Join,
    KeepCheckpoints,
    KeepEvery,
    ListenAt,
    LogTo,
    Memory,
    Noise,
    OpenAt,
    Parts,
    Place,
    Preflight,
    ProfileStep,
    RealLinks,
    Rehearse,
    Resume,
    SamplesAtOnce,
    Seed,
    Serve,
    ShapesWanted,
    StateWanted,
    Steal,
    SumsWanted,
    TokenFile,
    Weights,
    WithCpu,
    names_in,
    places_in,
)
from evener.core.addresses import host_and_port
from evener.core.faults import parse_faults
from evener.core.job import MAX_SAMPLES
from evener.errors import UsageError

if TYPE_CHECKING:
    from evener.session.journal import Outcome
    from evener.session.request import Request


def train(
    script: Annotated[
        Path | None, typer.Argument(help="Python file with a function recipe() → ev.Recipe.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimiser steps to take.")] = None,
    epochs: Annotated[
        float | None, typer.Option(min=0, max=1e9, help="Passes over the data (default 1).")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, max=MAX_SAMPLES, help="Global batch, samples a step.")
    ] = None,
    micro_batch: SamplesAtOnce = None,
    batch_per_device: BatchPerDevice = None,
    even: Annotated[bool, typer.Option("--even", help="The same share for every device.")] = False,
    keep_all: Annotated[bool, typer.Option("--keep-all", help="Leave no device out.")] = False,
    shapes: ShapesWanted = "auto",
    plan: Annotated[Path | None, typer.Option(help="A plan file from evener plan.")] = None,
    profile: Annotated[Path | None, typer.Option(help="A profile file; without it the run measures.")] = None,
    fleet: Annotated[Path | None, typer.Option(help="A fleet file of this host's devices.")] = None,
    rehearse: Rehearse = None,
    real_links: RealLinks = False,
    devices: Devices = None,
    with_cpu: WithCpu = False,
    memory: Memory = None,
    weights: Weights = None,
    adapt: Adapt = True,
    steal: Steal = False,
    state: StateWanted = "replicated",
    parts: Parts = None,
    place: Place = None,
    sums: SumsWanted = "auto",
    compress: Compress = None,
    fewer: FewerExchanges = None,
    faults: Faults = "",
    noise: Noise = None,
    seed: Seed = None,
    checkpoint_every: CheckpointEvery = None,
    keep_checkpoints: KeepCheckpoints = 3,
    keep_every: KeepEvery = 0,
    resume: Resume = None,
    run_dir: Annotated[Path | None, typer.Option(help="Folder of the run's files (default runs/…).")] = None,
    no_heldout: Annotated[bool, typer.Option("--no-heldout", help="Skip the held-out loss.")] = False,
    profile_step: ProfileStep = None,
    serve: Serve = False,
    listen: ListenAt = None,
    log_to: LogTo = None,
    elastic: Elastic = True,
    copy_every: CopyEvery = 10,
    open_at: OpenAt = "127.0.0.1:0",
    join: Join = None,
    token_file: TokenFile = None,
    preflight: Preflight = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No live view and no report text.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train a recipe on all devices of this host, or rehearse another fleet here.

    Measures the devices and the model unless --profile or --plan is given, plans who does what (uneven
    shares, or a pipeline where no device holds the model), trains, and reports where every second went.
    Under torchrun it joins that job instead of starting processes. With --join it takes part in a run
    that another evener train started.
    """
    _only_one("--steps", steps, "--epochs", epochs)
    _only_one("--even", even or None, "--batch-per-device", batch_per_device)
    _only_one(_PLANS_WAY, plan, _WAYS, compress or fewer or sums != "auto" or None)
    _check_join(join, token_file, real_links=real_links)
    for address in filter(None, (listen, open_at, join)):
        host_and_port(address, example="127.0.0.1:8080")
    if script is None and not join:
        raise UsageError("nothing to train was named", remedy="evener train SCRIPT")
    from evener.session.launching.server import start_early

    start_early(None if join else script)
    from evener.session.ask import request_for
    from evener.session.checkpoints.save_rule import Keep, rule_of
    from evener.session.launched import world_size_here

    listen = listen or (SERVED_AT if serve else None)
    if world_size_here() is not None and (listen or log_to):
        raise _beside_torchrun()
    if join and token_file:
        outcome = _join(join, token_file, script, fleet, rehearse, devices, run_dir, quiet=quiet)
        if as_json and outcome is not None:
            print_json(outcome.as_json())
        _end_at_once()
    assert script is not None
    keep = Keep(last=keep_checkpoints, every=keep_every)
    request = request_for(
        script,
        fleet=fleet,
        rehearse=rehearse,
        real_links=real_links,
        devices=devices,
        with_cpu=with_cpu,
        memory=memory or (),
        batch=batch,
        batch_per_device=batch_per_device,
        plan=plan,
        profile=profile,
        run_dir=run_dir,
        steps=steps,
        epochs=epochs,
        micro_batch=micro_batch,
        even=even,
        keep_all=keep_all,
        shapes=shapes,
        weights=str(weights.resolve()) if weights else None,
        adapt=adapt,
        steal=steal,
        state=state,
        parts=parts,
        place=places_in(place or []),
        sums=sums,
        compress=names_in(compress),
        fewer=names_in(fewer),
        faults=parse_faults(faults),
        noise=noise,
        seed=seed,
        checkpoint=rule_of(checkpoint_every, keep) if checkpoint_every else None,
        resume=resume,
        evaluate=not no_heldout,
        quiet=quiet,
        profile_step=profile_step,
        elastic=elastic,
        snapshot_every=copy_every,
        open_at=open_at,
        preflight=preflight,
    )
    outcome = _run(request, listen, log_to or ())
    if as_json and outcome is not None:
        print_json(outcome.as_json())
    if world_size_here() is not None:
        _end_at_once()


def _run(request: "Request", listen: str | None, log_to: Sequence[str]) -> "Outcome | None":
    """The run that was asked for, and whoever looks on, in a folder of its own."""
    from evener.cli.interrupts import orderly_sigterm
    from evener.core.tell import tell
    from evener.serving.watching import watching
    from evener.session.checkpoints.resume import check_folder, stopped
    from evener.session.launched import world_size_here
    from evener.session.launching.launch import run
    from evener.session.request import unless_unused

    folder = Path(request.run_dir)
    check_folder(folder, request.resume)
    if world_size_here() is not None:
        return run(request)
    try:
        with (
            orderly_sigterm(),
            unless_unused(request.run_dir),
            watching(folder, listen=listen, log_to=log_to),
        ):
            return run(request)
    except (KeyboardInterrupt, SystemExit):
        tell(stopped(folder, request.script, saves=request.checkpoint is not None))
        raise


def _join(
    address: str,
    token_file: Path,
    script: Path | None,
    fleet: Path | None,
    rehearse: Path | None,
    devices: str | None,
    run_dir: Path | None,
    *,
    quiet: bool,
) -> Any:
    """One device of this host in a job that runs already."""
    from evener.session.ask import fleet_of
    from evener.session.launching.visit import visit

    here = fleet_of(fleet, rehearse, devices, None)
    return visit(
        address,
        token_file,
        here,
        script=script,
        run_dir=run_dir,
        rehearse=rehearse is not None,
        quiet=quiet,
    )


_PLANS_WAY, _WAYS = "--plan, which says how gradients go,", "--sums, --compress or --fewer"


def _only_one(first: str, one: object, second: str, other: object) -> None:
    if one not in (None, "") and other not in (None, ""):
        raise UsageError(f"{first} and {second} exclude each other", remedy="give one of them")


def _check_join(join: str | None, token_file: Path | None, *, real_links: bool) -> None:
    if join and real_links:
        raise UsageError(
            "--real-links belongs to the command that starts a job: no device joins into its namespaces",
            remedy="leave one of --join and --real-links out",
        )
    if join and token_file is None:
        raise UsageError("--join needs the job's token", remedy="--token-file RUN/join-token")


def _beside_torchrun() -> UsageError:
    return UsageError(
        "--serve and --log-to run beside processes that evener train starts, not in one of torchrun's",
        remedy="evener watch RUN --serve, in another terminal, on a host that sees the run's folder",
    )


def _end_at_once() -> None:
    """Under torchrun: torch's threads now and then abort a process that ends the long way."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def print_json(value: Any) -> None:
    """One object on the last line of standard output."""
    print(json.dumps(value), flush=True)
