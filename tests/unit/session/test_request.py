"""What a request cannot ask for, and where its files can go."""

from pathlib import Path
from typing import Any

import pytest

from evener.core.fewer import Fewer
from evener.core.files import write
from evener.core.fleet import Device, Fleet
from evener.core.plan import Pipeline, Plan, Share, Stage, TablePlacement
from evener.errors import FileError, UsageError
from evener.session.ask import request_for
from evener.session.planning.decide import samples_to_train
from evener.session.request import Request, may_change_devices, new_run_dir, unless_unused

ONE = Fleet(devices=(Device(name="lab/a", kind="cpu"),))


def asked(script: Path, run_dir: Path, fleet: Path) -> Request:
    """The request of a command line that says no more than that."""
    write(fleet, ONE)
    return request_for(
        script,
        fleet=fleet,
        rehearse=None,
        devices=None,
        batch=None,
        batch_per_device=None,
        run_dir=run_dir,
    )


@pytest.mark.parametrize("epochs", [0.0, -1.0, float("nan"), float("inf")])
def test_no_epoch_is_no_run(epochs: float) -> None:
    with pytest.raises(UsageError, match="epochs cannot be trained"):
        Request(fleet=ONE, run_dir="runs", epochs=epochs)


def test_no_step_is_no_run() -> None:
    with pytest.raises(UsageError, match="0 steps train nothing"):
        Request(fleet=ONE, run_dir="runs", steps=0)


@pytest.mark.parametrize(("epochs", "samples"), [(None, 10), (0.5, 5), (2.0, 20), (0.01, 1)])
def test_so_many_epochs_are_so_many_samples(epochs: float | None, samples: int) -> None:
    assert samples_to_train(Request(fleet=ONE, run_dir="runs", epochs=epochs), 10, 4) == samples


def test_a_run_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    file = tmp_path / "script.py"
    file.write_text("def recipe(): ...")
    for folder in (file, file / "inside"):
        with pytest.raises(FileError, match=f"cannot make the run's folder {folder}: "):
            asked(file, folder, tmp_path / "fleet.json")
    with pytest.raises(FileError, match="EVENER_RUNS"):
        new_run_dir("job", "now", root=str(file))


def test_a_run_folder_that_is_there_is_used(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("def recipe(): ...")
    assert asked(script, tmp_path, tmp_path / "fleet.json").run_dir == str(tmp_path)
    assert new_run_dir("job", "now", root=str(tmp_path)) != new_run_dir("job", "now", root=str(tmp_path))


def planned(**more: Any) -> Plan:
    stage = Stage(layers=("0",), shares=(Share(devices=("lab/a",), samples=2),))
    return Plan(global_batch=2, pipelines=(Pipeline(samples=2, micro_batch=2, stages=(stage,)),), **more)


@pytest.mark.parametrize(
    ("wishes", "may"),
    [
        ({}, True),
        ({"elastic": False}, False),
        ({"state": "optimizer"}, False),
        ({"place": {"emb": "cpu"}}, False),
        ({"place": {"emb": "dense", "*": "auto"}}, True),
        ({"fewer": ("delayed",)}, False),
        ({"fewer": ("accumulate:4",)}, True),
        ({"plan": planned()}, True),
        ({"plan": planned(fewer=Fewer(how="local", every=4))}, False),
        ({"plan": planned(tables=(TablePlacement(table="emb", rows={"lab/a": 5}),))}, False),
        ({"plan": planned(tables=(TablePlacement(table="emb", rows={}, residence="dense"),))}, True),
    ],
)
def test_what_nobody_else_has_keeps_devices_from_changing(wishes: dict[str, Any], may: bool) -> None:
    assert may_change_devices(Request(fleet=ONE, run_dir="runs", **wishes)) is may


@pytest.mark.parametrize("seed", [-1, 2**63, 10**30])
def test_a_seed_that_no_generator_takes_is_refused(seed: int) -> None:
    with pytest.raises(UsageError, match=f"the seed is {seed}"):
        Request(fleet=Fleet(devices=(Device(name="h/a", kind="cpu"),)), run_dir="runs", seed=seed)


def test_a_start_that_failed_leaves_no_folder_unless_there_is_something_to_read(tmp_path: Path) -> None:
    for name, kept in (("join-token", False), (".claim", False), ("profile.json", True)):
        folder = tmp_path / name / "run"
        folder.mkdir(parents=True)
        (folder / name).write_text("x")
        with pytest.raises(UsageError), unless_unused(str(folder)):
            raise UsageError("no")
        assert folder.exists() == kept
