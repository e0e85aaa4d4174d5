"""The power is cut before every operation of a checkpoint: the newest complete one always loads."""

from pathlib import Path

import pytest
import torch

from evener.runtime.checkpoints.files import Disk
from evener.runtime.checkpoints.folder import FOLDER, checkpoints_in, newest_good, remove_partial
from tests.checkpoints import save, tensors_at
from tests.disk import CutDisk, Loss, PowerCut

BEFORE, SAVED = (8, 16), 24


def num_operations(tmp_path: Path) -> int:
    run = tmp_path / "whole"
    for samples in BEFORE:
        save(run, samples, keep_last=2)
    disk = CutDisk()
    assert save(run, SAVED, disk, keep_last=2).path is not None
    return disk.count


@pytest.mark.parametrize("loss", ["nothing", "contents", "names"])
def test_a_cut_before_every_operation(tmp_path: Path, loss: Loss) -> None:
    """Two older checkpoints, of which the new one prunes the first; whatever was not synced may be lost."""
    total = num_operations(tmp_path)
    assert total >= 20
    complete_after = []
    for operations in range(total):
        run = tmp_path / f"cut{operations}"
        for samples in BEFORE:
            save(run, samples, keep_last=2)
        disk = CutDisk(operations)
        with pytest.raises(PowerCut):
            save(run, SAVED, disk, keep_last=2)
        disk.lose(loss)
        found, passed = newest_good(run)
        assert found is not None and passed == ()
        assert found.samples_seen in (BEFORE[-1], SAVED)
        for held in tensors_at(found.samples_seen).values():
            assert all(torch.equal(t, held[name]) for name, t in found.read(list(held)).items())
        complete_after.append(found.samples_seen == SAVED)
        remove_partial(Disk(), run / FOLDER)  # as the next run does
        assert save(run, SAVED + 8, keep_last=2).path is not None
        assert newest_good(run)[0].samples_seen == SAVED + 8
        assert not [p for p in (run / FOLDER).iterdir() if p.name.startswith(".")]
        assert len(checkpoints_in(run)) == 2
    assert complete_after == sorted(complete_after), "once it is there it stays"
    assert True in complete_after and False in complete_after


def test_a_cut_while_a_damaged_one_of_the_same_samples_is_replaced(tmp_path: Path) -> None:
    for operations in range(60):
        run = tmp_path / f"cut{operations}"
        save(run, 8)
        again = save(run, 16).path
        (again / "shard-00001-of-00002.safetensors").write_bytes(b"")
        disk = CutDisk(operations)
        try:
            save(run, 16, disk)
        except PowerCut:
            disk.lose("names")
            found, _ = newest_good(run)
            assert found is not None and found.samples_seen in (8, 16)
            continue
        assert newest_good(run)[0].samples_seen == 16
        return
    raise AssertionError("it never came to an end")
