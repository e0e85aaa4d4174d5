"""`evener verify`: is the result that of one device? Yes or no, with the distance."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evener.cli.interrupts import orderly_sigterm
from evener.cli.options import (
    MAX_SEED,
    AsJson,
    BatchPerDevice,
    Compress,
    Devices,
    FewerExchanges,
    Rehearse,
    SumsWanted,
    names_in,
)
from evener.core.job import MAX_SAMPLES
from evener.core.words import counted, some
from evener.errors import NotExactError
from evener.session.launched import check_unlaunched
from evener.session.request import new_run_dir, runs_folder

if TYPE_CHECKING:
    from evener.session.exactness.verify import Exactness


def verify(
    script: Annotated[Path, typer.Argument(help="Python file with a function recipe() → ev.Recipe.")],
    steps: Annotated[int, typer.Option(min=1, help="Optimiser steps to compare.")] = 5,
    batch: Annotated[
        int | None, typer.Option(min=1, max=MAX_SAMPLES, help="Global batch, samples a step.")
    ] = None,
    batch_per_device: BatchPerDevice = None,
    plan: Annotated[Path | None, typer.Option(help="A plan file from evener plan.")] = None,
    profile: Annotated[Path | None, typer.Option(help="A profile file; without it the run measures.")] = None,
    fleet: Annotated[Path | None, typer.Option(help="A fleet file of this host's devices.")] = None,
    rehearse: Rehearse = None,
    devices: Devices = None,
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Seed of weights and order.")] = 0,
    sums: SumsWanted = "auto",
    compress: Compress = None,
    fewer: FewerExchanges = None,
    run_dir: Annotated[Path | None, typer.Option(help="Keep the files of the runs in this folder.")] = None,
    as_json: AsJson = False,
) -> None:
    """Run the same steps on the devices together and in a plain PyTorch loop on one, and compare.

    On one device each batch is taken in two unequal parts; --rehearse FLEET also compares sums over devices.
    Exit code 0 if the gradient of the first step agrees within 1e-6 in float32 and 1e-12 in float64 and the
    parameters after all steps within 1e-10 in float64; 1 if not, which is also the answer for a plan with
    devices in a lower precision: the distance is then printed beside what that precision explains.
    """
    import msgspec

    from evener.cli.train import print_json
    from evener.session.launching.server import start_early

    check_unlaunched("evener verify")
    start_early(script)
    from evener.session.ask import request_for

    with orderly_sigterm(), folder_for(run_dir) as folder:
        request = request_for(
            script,
            fleet=fleet,
            rehearse=rehearse,
            devices=devices,
            batch=batch,
            batch_per_device=batch_per_device,
            plan=plan,
            profile=profile,
            run_dir=folder,
            steps=steps,
            seed=seed,
            sums=sums,
            compress=names_in(compress),
            fewer=names_in(fewer),
            quiet=True,
        )
        from evener.session.exactness.verify import verify as compare

        found = compare(request)
    print(told(found))
    if as_json:
        print_json(msgspec.to_builtins(found))
    if not found.exact:
        raise typer.Exit(NotExactError.exit_code)


def told(found: "Exactness") -> str:
    """Every distance with its bound, the notes, the verdict, and what may be the cause."""
    shares = ", ".join(f"{name} {n}" for name, n in found.plan.samples_by_device().items())
    single, double = conditions_of(found)
    lines = [
        f"samples a step:           {shares}",
        f"first gradient, float32:  {found.gradient_error:.2e}   (bound {found.gradient_bound:.0e}{single})",
        f"first gradient, float64:  {found.gradient_error_float64:.2e}   (bound 1e-12{double})",
        f"parameters after {counted(found.steps, 'step')}, float64: "
        f"{found.parameter_error_float64:.2e}   (bound 1e-10{double})",
    ]
    if found.deviation is not None:
        lines.append(
            f"away from one sum a step: {found.deviation:.2e}   (float64; ‖p - q‖ / ‖q - start‖, p the "
            f"parameters at the end by {found.fewer}, q those of a plain loop with one sum a step)"
        )
    lines += [f"note: {note}" for note in found.notes]
    lines.append(f"exact: {verdict_of(found)}")
    hint = hint_of(found)
    return "\n".join([*lines, hint] if hint else lines)


@contextmanager
def folder_for(run_dir: Path | None) -> Iterator[Path]:
    """Where the runs' files go: they are of no use afterwards, unless `run_dir` was asked for.

    Among the runs: the system's folder for temporary files is memory on some hosts. FileError where none can
    be made there.
    """
    if run_dir:
        yield run_dir
        return
    base = runs_folder()
    was_there = base.exists()
    folder = new_run_dir(".verify", str(os.getpid()))
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if not was_there:
            with suppress(OSError):  # other runs are in it by now
                base.rmdir()


def conditions_of(found: "Exactness") -> tuple[str, str]:
    """What the lines of float32 and those of float64 were computed with, where the plan is not exact.

    Example: int8 between hosts: ("; with int8 between hosts", "; without int8").
    """
    same = f"; against a plain loop that does {found.fewer} too" if found.fewer else ""
    packed = ", ".join(found.compressed)
    lower = ", ".join(found.lower_precision)
    used = f"; with {packed} between hosts" if packed else ""
    used += f"; with {lower}" if lower else ""
    left = ", ".join(filter(None, (packed, lower)))
    return used + same, (f"; without {left}" if left else "") + same


def verdict_of(found: "Exactness") -> str:
    """Yes or no, and why not where the plan itself says so."""
    if found.nothing:
        return (
            f"nothing was compared: {found.nothing}; what would work: a batch of several samples, "
            "--batch-per-device, --rehearse FLEET"
        )
    if found.exact:
        return "yes"
    said = [f"{precision} on {', '.join(on)}" for precision, on in found.lower_precision.items()]
    said += [f"{name} between hosts" for name in found.compressed]
    said += [f"{found.fewer} in the place of one sum a step"] if found.fewer else []
    others = f"buffers that are not one device's: {some(found.buffers, 5)}" if found.buffers else ""
    if not said:
        return f"no: {others}" if found.as_planned and others else "no"
    where, others = "; ".join(said), f"; {others}" if others else ""
    distance = f"gradient error {found.gradient_error:.0e}"
    if found.as_planned:
        return (
            f"no, as the plan says: {where}; {distance}, within the {found.gradient_bound:.0e} that follows"
            f"{others}"
        )
    return f"no: {distance}, more than the {found.gradient_bound:.0e} that follows from {where}{others}"


def hint_of(found: "Exactness") -> str:
    """The error where float64 differs, which rounding and lower precision do not explain; else ""."""
    from evener.session.exactness.verify import FLOAT64_BOUND, PARAMETER_BOUND

    if found.gradient_error_float64 <= FLOAT64_BOUND and found.parameter_error_float64 <= PARAMETER_BOUND:
        return ""
    return NotExactError(
        "float64 differs as well, so this is no rounding",
        remedy="weight= with what the loss's mean divides by, where that is not samples (masked labels and "
        "ignore_index: the valid ones; class weights: their sum); reduction='sum' for a loss given as a sum; "
        "a model that mixes the samples of a batch is not exact on any split, nor are hooks on gradients "
        "that are not linear, such as a clamp",
    ).render()
