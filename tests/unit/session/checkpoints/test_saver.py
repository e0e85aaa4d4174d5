"""One process saves: in the background, one at a time, given up when asked; never the end of a training."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from evener.errors import ModelError
from evener.runtime.checkpoints.files import Disk, Writing
from evener.runtime.checkpoints.folder import checkpoints_in, newest_good
from evener.runtime.checkpoints.manifest import Manifest
from evener.runtime.checkpoints.shards import Later
from evener.runtime.ranks import Ranks
from evener.runtime.state import export_state
from evener.session.checkpoints.save_rule import Keep
from evener.session.checkpoints.saver import GIVEN_UP, Own, Saver
from evener.session.meeting import Meeting
from tests.checkpoints import manifest_at


class Subject:
    """One parameter, all by itself; the second of two devices never tells anything."""

    def __init__(self, devices: tuple[str, ...] = ("lab/a",)) -> None:
        self.ranks = Ranks(devices, "lab/a")
        self.p = nn.Parameter(torch.zeros(4))
        self.p.grad = torch.ones(4)
        self.optimizer = torch.optim.SGD([self.p], lr=1.0)
        self.samples_seen = 0
        self.break_with: Exception | None = None
        self.spared: dict[Path, int] = {}
        self.released = 0

    def own(self) -> Own:
        if self.break_with:
            raise self.break_with
        return Own(
            tensors=export_state({"p": self.p}, self.optimizer),
            statistics={},
            later={"q": Later(torch.empty(3, device="meta"), lambda: torch.arange(3.0))},
            spared=self.spared,
            release=self.release,
        )

    def release(self) -> None:
        self.released += 1

    def manifest(self) -> Manifest:
        return manifest_at(self.samples_seen)


class HeldDisk(Disk):
    """A disk that writes nothing until it is let go."""

    def __init__(self) -> None:
        self.free = threading.Event()

    def create(self, path: Path) -> Writing:
        self.free.wait(10)
        return super().create(path)


Made = Callable[..., tuple[Saver, Subject, list[str]]]


@pytest.fixture
def made(tmp_path: Path) -> Made:
    def make(devices: tuple[str, ...] = ("lab/a",), files: Disk | None = None, keep: int = 3):
        subject, said = Subject(devices), []
        meeting = Meeting(dist.HashStore(), 0, 1)
        saver = Saver(subject, tmp_path, meeting, Keep(last=keep), said.append, files=files)
        return saver, subject, said

    return make


def save(saver: Saver, subject: Subject, samples: int) -> None:
    subject.samples_seen = samples
    saver.begin(samples)


def test_the_training_goes_on_and_the_state_is_that_of_the_boundary(made: Made, tmp_path: Path) -> None:
    disk = HeldDisk()
    saver, subject, said = made(files=disk)
    save(saver, subject, 8)
    for _ in range(3):
        subject.optimizer.step()
    assert saver.is_busy and checkpoints_in(tmp_path) == []
    disk.free.set()
    saver.join()
    found, _ = newest_good(tmp_path)
    assert torch.equal(found.read(["model/p"])["model/p"], torch.zeros(4)) and said == []
    assert len(saver.seconds) == 1 and not saver.is_busy
    save(saver, subject, 16)
    saver.join()
    assert torch.equal(newest_good(tmp_path)[0].read(["model/p"])["model/p"], torch.full((4,), -3.0))
    saver.close()


def test_what_is_read_later_is_let_go_once_and_the_room_that_the_training_needs_is_left(
    made: Made, tmp_path: Path
) -> None:
    saver, subject, said = made()
    save(saver, subject, 8)
    saver.join()
    assert torch.equal(newest_good(tmp_path)[0].read(["q"])["q"], torch.arange(3.0))
    subject.spared = {tmp_path: 10**18}
    save(saver, subject, 16)
    saver.join()
    assert "needs the rest of its disk" in said[0] and said[0].endswith("the training goes on")
    assert newest_good(tmp_path)[0].manifest.position.samples_seen == 8
    saver.close()
    assert subject.released == 2


def test_one_that_is_under_way_is_given_up_at_once(made: Made, tmp_path: Path) -> None:
    """Another device is lost: it will never tell of its shard, and nobody waits for it."""
    saver, subject, said = made(devices=("lab/a", "lab/b"))
    save(saver, subject, 8)
    start = time.monotonic()
    saver.close()
    assert time.monotonic() - start < 1.0
    assert said == [f"no checkpoint of 8 samples (step 1): {GIVEN_UP}; the training goes on"]
    assert newest_good(tmp_path)[0] is None
    _, _, said = made()
    assert "1 unfinished" in said[0] and list((tmp_path / "checkpoints").iterdir()) == []


def test_a_disk_that_hangs_holds_nobody_up(made: Made, tmp_path: Path) -> None:
    disk = HeldDisk()
    saver, subject, _ = made(files=disk)
    save(saver, subject, 8)
    start = time.monotonic()
    saver.close()
    assert time.monotonic() - start < 1.0
    disk.free.set()
    subject.optimizer.step()


@pytest.mark.parametrize("error", [ModelError("a list"), RuntimeError("not enough memory"), MemoryError()])
def test_what_cannot_be_copied_is_told_and_the_optimiser_moves(made: Made, tmp_path: Path, error) -> None:
    saver, subject, said = made()
    subject.break_with = error
    save(saver, subject, 8)
    subject.optimizer.step()
    saver.join()
    assert len(said) == 1 and "lab/a" in said[0] and said[0].endswith("the training goes on")
    subject.break_with = None
    save(saver, subject, 16)
    saver.join()
    assert newest_good(tmp_path)[0].samples_seen == 16


def test_old_ones_go(made: Made, tmp_path: Path) -> None:
    saver, subject, _ = made(keep=2)
    for samples in (8, 16, 24):
        save(saver, subject, samples)
    saver.join()
    assert [c.samples_seen for c in checkpoints_in(tmp_path)] == [24, 16]


def test_a_device_that_is_lost_while_all_save_is_not_waited_for(made: Made, tmp_path: Path) -> None:
    """Story: at the end of a run everybody waited, without end, for the shard of a device that was gone."""
    saver, subject, said = made(devices=("lab/a", "lab/b"))
    saver._meeting.alarm = lambda: "the process of lab/b has ended"
    save(saver, subject, 8)
    saver.join()
    assert said == [
        "no checkpoint of 8 samples (step 1): the process of lab/b has ended; the training goes on"
    ] and not checkpoints_in(tmp_path)
    saver.close()
