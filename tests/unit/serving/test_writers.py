"""Records for other tools, read back with the tools themselves."""

import importlib.util
import subprocess
import sys

import pytest

from evener.core.records import StepRecord
from evener.errors import FileError, UsageError
from evener.serving.watching import watching
from evener.serving.writers import Relay, open_writers, scalars
from tests.unit.report.page.runs import run_folder, write_metrics
from tests.unit.report.worked import RECORDS, record


class Kept:
    def __init__(self) -> None:
        self.records: list[StepRecord] = []
        self.closed = False

    def add(self, record: StepRecord) -> None:
        self.records.append(record)

    def close(self) -> None:
        self.closed = True


def test_every_record_is_handed_on_once_and_in_order(tmp_path) -> None:
    path = run_folder(tmp_path / "run", finished=False, records=RECORDS[:4])
    kept = Kept()
    relay = Relay(path, [kept], look_s=60)
    assert relay.pass_on() == 4 and relay.pass_on() == 0
    write_metrics(path, RECORDS[4:7], mode="ab")
    assert relay.pass_on() == 3
    with relay:  # what came since the last look is handed on at the end
        write_metrics(path, RECORDS[7:], mode="ab")
    assert tuple(kept.records) == RECORDS and kept.closed


def test_a_log_that_cannot_be_written_is_told_once_and_leaves_the_run_alone(tmp_path) -> None:
    """The thread ended with a traceback that nobody asked for, and what came later was not in the log."""

    class Full(Kept):
        def add(self, record: StepRecord) -> None:
            raise OSError(28, "No space left on device")

    full, told = Full(), list[str]()
    with Relay(run_folder(tmp_path / "run"), [full], look_s=60, say=told.append):
        pass
    assert full.closed
    (said,) = told
    assert said.startswith("nothing more is written") and "No space left" in said


def test_what_is_written_of_a_step() -> None:
    named = scalars(record(3))
    assert named["loss"] == pytest.approx(5.2) and named["samples_per_s"] == pytest.approx(14 / 1.2)
    assert named["seconds/lab/a/compute"] == 1.0
    skipped = scalars(record(3, loss=None, skipped="NaN"))
    assert "loss" not in skipped and skipped["samples_per_s"] == 0


def test_tensorboard_reads_what_was_written(tmp_path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    path = run_folder(tmp_path / "run")
    with watching(path, listen=None, log_to=("tensorboard",)):
        pass
    found = EventAccumulator(str(path / "tensorboard"))
    found.Reload()
    losses = {e.step: e.value for e in found.Scalars("loss")}
    assert losses == pytest.approx({r.step: r.loss for r in RECORDS}, rel=1e-6)


def test_wandb_writes_offline(tmp_path) -> None:
    if importlib.util.find_spec("wandb") is None:
        pytest.skip("wandb is not installed: pip install 'evener[wandb]'")
    path = run_folder(tmp_path / "run")
    code = (
        "import sys; from evener.serving.watching import watching\n"
        "with watching(sys.argv[1], listen=None, log_to=('wandb',)): pass"
    )
    command = [sys.executable, "-c", code, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    (written,) = path.glob("wandb/offline-run-*/*.wandb")
    raw = written.read_bytes()
    assert b"seconds/lab/a/compute" in raw and b"samples_per_s" in raw


def test_an_unknown_log_and_a_link_are_refused(tmp_path) -> None:
    with pytest.raises(UsageError, match="no log is called csv"):
        open_writers(("csv",), tmp_path)
    (tmp_path / "tensorboard").symlink_to(tmp_path.parent)
    with pytest.raises(FileError, match="is a link"):
        open_writers(("tensorboard",), tmp_path)
