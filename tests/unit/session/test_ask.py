"""From what a person says to a request: what is refused before any process is started."""

from pathlib import Path

import pytest

from evener.core.figures import Figure
from evener.core.files import write
from evener.core.fleet import Device, Fleet, Rehearsed
from evener.core.split import split_of
from evener.errors import UsageError
from evener.session.ask import fleet_of, with_cpus
from tests.architecture.source import ROOT

FLEETS = sorted((ROOT / "examples" / "fleets").rglob("*.json"))


def figure(value: float) -> Figure:
    return Figure(value=value, source="assumed")


def device(name: str, *, kind: str = "box", flops: float = 8e9, **more: object) -> Device:
    return Device(name=name, kind=kind, flops={"float32": figure(flops)}, launch_s=figure(1e-5), **more)  # type: ignore[arg-type]


def file_of(folder: Path, *devices: Device) -> Path:
    path = folder / "fleet.json"
    write(path, Fleet(devices=devices))
    return path


@pytest.mark.parametrize(
    ("second", "told"),
    [
        (device("lab/b", flops=2e9), "flops float32 8e+09 and 2e+09"),
        (device("lab/b", bytes_per_s=figure(1e9)), "bytes_per_s none and 1e+09"),
        (device("lab/b", rehearsed=Rehearsed(factors={"matmul": 0.5})), "factor of matmul none and 0.5"),
    ],
)
def test_one_kind_with_two_paces_would_be_measured_once(tmp_path: Path, second: Device, told: str) -> None:
    path = file_of(tmp_path, device("lab/a"), second)
    with pytest.raises(UsageError) as caught:
        fleet_of(None, path, None, None)
    assert caught.value.numbers == f"lab/a and lab/b are both of kind 'box': {told}"
    assert "a kind of its own" in caught.value.remedy
    assert fleet_of(None, path, "lab/b", None).devices == (second,)  # alone it has the kind to itself
    assert len(fleet_of(path, None, None, None).devices) == 2  # what was measured may scatter


def test_memory_and_scatter_may_differ(tmp_path: Path) -> None:
    small = device("lab/b", memory_bytes=figure(1e9), rehearsed=Rehearsed(factors={"matmul": 1.0}))
    assert len(fleet_of(None, file_of(tmp_path, device("lab/a"), small), None, None).devices) == 2


@pytest.mark.parametrize("path", FLEETS, ids=lambda p: p.stem)
def test_the_examples_can_be_rehearsed(path: Path) -> None:
    assert fleet_of(None, path, None, None).devices


def test_a_cpu_that_is_not_named_is_the_host_of_those_that_are(tmp_path: Path) -> None:
    """Its memory holds tables; with --with-cpu it takes samples."""
    path = file_of(
        tmp_path, device("lab/gpu0", type="cuda"), device("lab/cpu", kind="cpu"), device("far/cpu")
    )
    found = fleet_of(path, None, "lab/gpu0", None)
    assert [d.name for d in found.devices] == ["lab/gpu0"]
    assert [d.name for d in found.hosts] == ["lab/cpu"]
    offered = with_cpus(found)
    assert [d.name for d in offered.devices] == ["lab/gpu0", "lab/cpu"] and not offered.hosts
    with pytest.raises(UsageError, match="--with-cpu offers the CPU beside accelerators"):
        with_cpus(fleet_of(path, None, "lab/cpu", None))


def test_what_is_no_number_is_told_with_what_parts_look_like() -> None:
    fleet = Fleet(devices=(device("lab1/a"), device("lab1/b")))
    with pytest.raises(UsageError, match="cannot read --parts '5,x': it has whole numbers") as told:
        split_of("5,x", fleet, "--parts")
    assert "1,1 in the order of the fleet, or lab1/a=1" in told.value.render()
