"""CPUs beside accelerators get the threads that are left, and the kind that goes with them."""

from pathlib import Path

import torch
from msgspec.structs import replace
from torch import nn

from evener.core.fleet import Device, Fleet
from evener.core.profile import Layer, Profile
from evener.session.beside import beside_accelerators
from evener.session.recipe import Recipe
from evener.session.request import Request

GPU = Device(name="lab/gpu0", kind="card", type="cuda", index=0)
CPU = Device(name="lab/cpu", kind="EPYC (16 threads)", threads=16)
FAR = Device(name="far/cpu", kind="EPYC (16 threads)", threads=16)
PROFILE = Profile(model="m", layers=(Layer(name="0", num_params=1, param_bytes=4),))


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


def test_where_nothing_is_measured_nothing_changes(tmp_path: Path) -> None:
    wanted = Request(fleet=Fleet(devices=(GPU, CPU)), run_dir=str(tmp_path))
    for other in (replace(wanted, rehearse=True), replace(wanted, profile=PROFILE)):
        assert beside_accelerators(other, recipe()) == (other, ())
    alone = replace(wanted, fleet=Fleet(devices=(CPU,)))
    assert beside_accelerators(alone, recipe(workers=3)) == (alone, ())
