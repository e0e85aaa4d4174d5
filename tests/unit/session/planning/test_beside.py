"""CPUs beside accelerators get the threads that are left, and the kind that goes with them."""

from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from torch import nn

from evener.core.figures import Figure
from evener.core.fleet import Device, Fleet
from evener.core.plan import Pipeline, Plan, Share, Stage
from evener.core.profile import Layer, Profile, Timing
from evener.session.planning.beside import beside_accelerators
from evener.session.recipe import Recipe
from evener.session.request import Request

GPU = Device(name="lab/gpu0", kind="card", type="cuda", index=0)
CPU = Device(name="lab/cpu", kind="EPYC (16 threads)", threads=16)
FAR = Device(name="far/cpu", kind="EPYC (16 threads)", threads=16)


def measured(kind: str) -> Profile:
    second = Figure(value=1.0, source="assumed")
    timing = Timing(layer="0", kind=kind, micro_batch=1, forward_s=second, backward_s=second)
    return Profile(model="m", layers=(Layer(name="0", num_params=1, param_bytes=4),), timings=(timing,))


def request(run_dir: Path, **more: Any) -> Request:
    return Request(fleet=Fleet(devices=(GPU, CPU)), run_dir=str(run_dir), **more)


def recipe(**more: object) -> Recipe:
    model = nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 1))
    return Recipe(
        model=model,
        dataset=[0],
        loss=nn.MSELoss(),
        optimizer=torch.optim.SGD,
        global_batch=1,
        **more,  # type: ignore[arg-type]
    )


def test_a_cpu_leaves_the_others_their_threads(tmp_path: Path) -> None:
    wanted = Request(fleet=Fleet(devices=(GPU, CPU, FAR)), run_dir=str(tmp_path))
    found, said = beside_accelerators(wanted, recipe(workers=3, place={"0": "cpu"}))
    cpu = found.fleet.device("lab/cpu")
    assert (cpu.threads, cpu.kind) == (8, "EPYC (8 threads)")
    assert said == (
        "lab/cpu computes with 8: 16 threads less 1 that queue for an accelerator, 6 that load data, "
        "1 that look up tables",
    )
    assert found.fleet.device("far/cpu") == FAR, "no accelerator there"


def test_a_plan_of_ones_own_leaves_the_others_their_threads_too(tmp_path: Path) -> None:
    """It names devices and no kinds: with all threads the CPU once stood in the accelerator's way."""
    stage = Stage(layers=("0",), shares=(Share(devices=("lab/cpu",), samples=1),))
    plan = Plan(global_batch=1, pipelines=(Pipeline(samples=1, micro_batch=1, stages=(stage,)),))
    found, said = beside_accelerators(request(tmp_path, plan=plan), recipe())
    assert found.fleet.device("lab/cpu").threads == 15 and said


def test_what_a_profile_was_made_for_is_kept(tmp_path: Path) -> None:
    wanted = request(tmp_path, profile=measured("EPYC (16 threads)"))
    found, said = beside_accelerators(wanted, recipe())
    assert found == wanted and said == (
        "lab/cpu keeps 16 threads: the profile has no seconds of EPYC (15 threads)",
    )
    found, _ = beside_accelerators(request(tmp_path, profile=measured("EPYC (15 threads)")), recipe())
    assert found.fleet.device("lab/cpu").kind == "EPYC (15 threads)"


def test_rehearsed_ones_and_those_alone_are_as_they_are(tmp_path: Path) -> None:
    wanted = request(tmp_path)
    other = replace(wanted, rehearse=True)
    assert beside_accelerators(other, recipe()) == (other, ())
    alone = replace(wanted, fleet=Fleet(devices=(CPU,)))
    assert beside_accelerators(alone, recipe(workers=3)) == (alone, ())
