"""The fleets to rehearse: valid, explained, and one kind for devices that behave alike."""

import msgspec
import pytest

from evener.core import files
from evener.core.fleet import Fleet
from tests.architecture.source import ROOT

PATHS = sorted((ROOT / "examples" / "fleets").glob("*.json"))
NAMES = {"8-4-2-2", "equal", "gpu-and-cpu", "one-fast-three-slow", "straggler", "two-hosts"}


def test_the_six_are_there() -> None:
    assert {p.stem for p in PATHS} >= NAMES


@pytest.mark.parametrize("path", PATHS, ids=lambda p: p.stem)
def test_a_fleet_says_what_it_is_for_and_connects_all_devices(path) -> None:
    fleet = files.read(path, Fleet)
    assert fleet.note
    names = [d.name for d in fleet.devices]
    assert all(fleet.link(a, b) for a in names for b in names if a != b)
    assert all(d.flops and d.launch_s and d.memory_bytes for d in fleet.devices)


@pytest.mark.parametrize("path", PATHS, ids=lambda p: p.stem)
def test_files_are_written_as_evener_writes_them(path) -> None:
    assert path.read_bytes() == files.encode(files.read(path, Fleet))


def test_devices_of_one_kind_behave_alike() -> None:
    """Profiles are kept by kind, so a hidden factor needs a kind of its own."""
    by_kind: dict[str, object] = {}
    for path in PATHS:
        for device in files.read(path, Fleet).devices:
            behaviour = msgspec.structs.replace(device, name="any/one", memory_bytes=None)
            assert by_kind.setdefault(device.kind, behaviour) == behaviour, f"{path.stem}: {device.name}"
