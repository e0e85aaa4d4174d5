"""A run's metrics for other tools: TensorBoard and Weights & Biases, fed from the run's folder."""

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from evener.core.records import StepRecord
from evener.core.tell import tell
from evener.core.threads import stand_back
from evener.core.tracebacks import last_line
from evener.errors import EnvironmentBrokenError, FileError, UsageError
from evener.serving.follow import Follower

LOOK_S = 2.0


class Writer(Protocol):
    """Takes in one record after another."""

    def add(self, record: StepRecord) -> None: ...

    def close(self) -> None: ...


def scalars(record: StepRecord) -> dict[str, float]:
    """What is written of a step, by name. Example: {"loss": 2.5, "seconds/lab1/a/compute": 0.9, ...}."""
    done = 0 if record.skipped else record.samples
    named = {"step_s": record.step_s, "samples_per_s": done / record.step_s}
    named |= {"loss": record.loss} if record.loss is not None else {}
    named |= {"lr": record.lr} if record.lr is not None else {}
    for device, by_cause in record.seconds.items():
        named |= {f"seconds/{device}/{cause}": s for cause, s in by_cause.items()}
    return named


class TensorBoardWriter:
    """Writes event files to `folder`, which `tensorboard --logdir` reads.

    By TensorBoard's own writer: torch's wrapper loads gRPC, with which a process that waits for others did
    not end.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as e:
            raise _missing("TensorBoard", "tensorboard", e) from e
        self._event, self._summary = Event, Summary
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(folder))

    def add(self, record: StepRecord) -> None:
        values = [self._summary.Value(tag=n, simple_value=v) for n, v in scalars(record).items()]
        summary = self._summary(value=values)
        self._writer.add_event(self._event(wall_time=time.time(), step=record.step, summary=summary))

    def close(self) -> None:
        self._writer.close()


class WandbWriter:
    """Logs to Weights & Biases, offline into `folder`/wandb unless WANDB_MODE says otherwise."""

    def __init__(self, folder: Path, name: str) -> None:
        try:
            import wandb
        except ImportError as e:
            raise _missing("Weights & Biases", "wandb", e) from e
        folder.mkdir(parents=True, exist_ok=True)
        settings = wandb.Settings(console="off", silent=True)
        mode: Any = os.environ.get("WANDB_MODE", "offline")
        self._run = wandb.init(project="evener", name=name, dir=str(folder), mode=mode, settings=settings)

    def add(self, record: StepRecord) -> None:
        self._run.log(scalars(record), step=record.step)

    def close(self) -> None:
        self._run.finish()


def _missing(tool: str, extra: str, error: ImportError) -> EnvironmentBrokenError:
    return EnvironmentBrokenError(
        f"{tool} cannot be written: {error}", remedy=f"pip install 'evener[{extra}]'"
    )


def open_writers(names: Sequence[str], folder: Path) -> list[Writer]:
    """The writers called `names` ("tensorboard", "wandb"), with files below the run's folder."""
    made: dict[str, Any] = {
        "tensorboard": lambda: TensorBoardWriter(folder / "tensorboard"),
        "wandb": lambda: WandbWriter(folder, folder.resolve().name),
    }
    unknown = [n for n in names if n not in made]
    if unknown:
        raise UsageError(f"no log is called {', '.join(unknown)}", remedy=f"one of {', '.join(made)}")
    for name in names:
        if (folder / name).is_symlink():
            raise FileError(f"{folder / name} is a link: nothing is written there", remedy="remove the link")
    return [made[n]() for n in dict.fromkeys(names)]


class Relay:
    """Hands every new record of the run in the folder at `path` to `writers`; a context manager.

    The first writer that fails ends it, which `say` is told: the run itself does not depend on it.
    """

    def __init__(
        self,
        path: str | Path,
        writers: Sequence[Writer],
        look_s: float = LOOK_S,
        say: Callable[[str], None] = tell,
    ) -> None:
        self._follower, self._writers, self._look_s, self._say = Follower(path), writers, look_s, say
        self._end = threading.Event()
        self._seen = 0
        self._thread = threading.Thread(target=self._run, name="evener logs", daemon=True)

    def __enter__(self) -> "Relay":
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._end.set()
        self._thread.join()
        with ExitStack() as stack:
            for writer in self._writers:
                stack.callback(writer.close)

    def _run(self) -> None:
        stand_back()
        try:
            while not self._end.wait(self._look_s):
                self.pass_on()
            while self.pass_on():
                continue
        except Exception as e:  # a full disk, a log's server: the run goes on
            self._say(f"nothing more is written to logs beside the run's own: {last_line(e)}")

    def pass_on(self) -> int:
        """Hand on what is new; how many records that were."""
        self._follower.look()
        new = self._follower.seen - self._seen
        self._seen = self._follower.seen
        for record in self._follower.records[-new:] if new else ():
            for writer in self._writers:
                writer.add(record)
        return new
