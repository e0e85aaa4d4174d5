"""A run's checkpoints: the newest good one, what a reader may ask for, what is pruned."""

from pathlib import Path

import pytest
import torch

from evener.errors import StateError
from evener.runtime.checkpoints.files import Disk
from evener.runtime.checkpoints.folder import (
    FOLDER,
    checkpoints_in,
    newest_good,
    open_checkpoint,
    remove_partial,
    to_prune,
)
from tests.checkpoints import save


def test_the_newest_is_found_and_damaged_ones_are_passed_over_with_a_reason(tmp_path: Path) -> None:
    for samples in (8, 16, 24):
        save(tmp_path, samples)
    newest, second, _ = checkpoints_in(tmp_path)
    assert [c.samples_seen for c in checkpoints_in(tmp_path / FOLDER)] == [24, 16, 8]
    assert newest_good(tmp_path) == (newest, ())
    (newest.path / "manifest.json").unlink()
    shard = second.path / "shard-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    found, passed = newest_good(tmp_path)
    assert found is not None and found.samples_seen == 8
    assert len(passed) == 2 and "000024" in passed[0] and "truncated" in passed[1]
    with pytest.raises(StateError, match="truncated"):
        open_checkpoint(second.path)


def test_nothing_there_is_none(tmp_path: Path) -> None:
    assert newest_good(tmp_path / "nowhere") == (None, ())
    (tmp_path / FOLDER / "samples-1").mkdir(parents=True)
    assert newest_good(tmp_path) == (None, ())


def test_tensors_are_read_by_name_from_whatever_shard_has_them(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save(tmp_path, 8).path)
    found = checkpoint.read(["model/b", "model/w"])
    assert torch.equal(found["model/w"], torch.full((3, 2), 8.0)) and found["model/b"].dtype == torch.float64
    with pytest.raises(StateError, match="lacks 1 tensor"):
        checkpoint.read(["model/b", "model/c"])


def test_a_good_one_of_the_same_samples_stays(tmp_path: Path) -> None:
    """A run that was taken up at an older checkpoint comes by the newer ones again."""
    first = save(tmp_path, 8).path
    inode = first.stat().st_ino
    again = save(tmp_path, 8)
    assert again.path == first and first.stat().st_ino == inode
    assert [p.name for p in (tmp_path / FOLDER).iterdir()] == [first.name]


def test_the_rule_of_pruning() -> None:
    assert to_prune([1, 2, 3, 4, 5, 6], 2, 3) == [1, 2, 4]
    assert to_prune([1, 2, 3], 3) == []
    assert to_prune([4, 3, 1], 1) == [1, 3]
    assert to_prune([], 1) == []


def test_pruning_keeps_the_last_ones(tmp_path: Path) -> None:
    assert [save(tmp_path, n, keep_last=2).pruned for n in (8, 16, 24)] == [(), (), ("samples-000000000008",)]
    assert [c.samples_seen for c in checkpoints_in(tmp_path)] == [24, 16]
    assert [c.manifest.number for c in checkpoints_in(tmp_path)] == [3, 2]


def test_what_was_never_finished_is_removed_and_nothing_else(tmp_path: Path) -> None:
    save(tmp_path, 8)
    folder = tmp_path / FOLDER
    (folder / ".samples-000000000016.12ab.partial").mkdir()
    (folder / ".samples-000000000016.12ab.partial" / "shard").write_text("half")
    (folder / "mine.txt").write_text("keep")
    assert remove_partial(Disk(), folder) == [".samples-000000000016.12ab.partial"]
    assert sorted(p.name for p in folder.iterdir()) == ["mine.txt", "samples-000000000008"]
