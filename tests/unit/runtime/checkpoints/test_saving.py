"""What goes wrong while saving is said in words, and leaves the former checkpoint and nothing else."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from evener.runtime.checkpoints.files import Disk
from evener.runtime.checkpoints.folder import FOLDER, newest_good, partial_of
from evener.runtime.checkpoints.saving import Part, Written, complete, write_part
from tests.checkpoints import manifest_at, save
from tests.disk import FullDisk


def test_a_full_disk_is_named_and_the_half_removed(tmp_path: Path) -> None:
    save(tmp_path, 8)
    saved = save(tmp_path, 16, FullDisk(100))
    assert saved.path is None and "No space left on device" in saved.why
    assert [p.name for p in (tmp_path / FOLDER).iterdir()] == ["samples-000000000008"]
    assert newest_good(tmp_path)[0].samples_seen == 8


def test_a_disk_that_fills_up_with_the_manifest(tmp_path: Path) -> None:
    """Every shard fits, the manifest does not."""
    save(tmp_path, 8)
    size = max(p.stat().st_size for p in (tmp_path / FOLDER).rglob("shard*"))
    assert size < 700
    saved = save(tmp_path, 16, FullDisk(700))
    assert saved.path is None and "No space left" in saved.why
    assert newest_good(tmp_path)[0].samples_seen == 8


def test_a_really_full_disk(tmp_path: Path) -> None:
    """A file system of 256 KiB in memory, where the tests may mount one."""
    mount = tmp_path / "small"
    mount.mkdir()
    if (
        not shutil.which("mount")
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(mount)], capture_output=True
        ).returncode
    ):
        pytest.skip("no right to mount a file system")
    try:
        assert save(mount, 8).path is not None
        part = Part(
            partial=mount / FOLDER / partial_of(16, "token"),
            device="lab/a",
            place=1,
            places=1,
            copy=lambda: {"model/w": torch.zeros(100_000)},
            statistics={},
        )
        written = write_part(Disk(), part)
        assert written.shard is None and "No space left on device" in written.error
        saved = complete(Disk(), part.partial, manifest_at(16), [written], keep_last=3)
        assert saved.path is None and newest_good(mount)[0].samples_seen == 8
        assert save(mount, 24).path is not None, "the room of the half is free again"
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def test_a_device_that_failed_is_the_reason(tmp_path: Path) -> None:
    partial = tmp_path / FOLDER / partial_of(8, "token")
    partial.mkdir(parents=True)
    saved = complete(Disk(), partial, manifest_at(8), [Written(error="lab/b: broken")], keep_last=3)
    assert saved.path is None and saved.why == "lab/b: broken" and not partial.exists()


def test_a_shard_that_the_leader_does_not_see(tmp_path: Path) -> None:
    """Two hosts without a common folder."""
    partial = tmp_path / FOLDER / partial_of(8, "token")
    part = Part(partial=partial, device="lab/a", place=1, places=1, copy=dict, statistics={})
    written = write_part(Disk(), part)
    (partial / written.shard.file).unlink()
    saved = complete(Disk(), partial, manifest_at(8), [written], keep_last=3)
    assert saved.path is None and "lab/a wrote its shard where this process does not see it" in saved.why


def test_a_copy_that_fails_is_told(tmp_path: Path) -> None:
    def fail():
        raise RuntimeError("no such stream")

    part = Part(partial=tmp_path / "x", device="lab/a", place=1, places=1, copy=fail, statistics={})
    assert write_part(Disk(), part).error == "RuntimeError: no such stream"
