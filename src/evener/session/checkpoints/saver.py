"""One process's part in saving: copies at a step boundary, a thread for the rest, one at a time."""

import secrets
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from evener.core.figures import Value
from evener.core.threads import stand_back
from evener.core.words import counted
from evener.errors import EvenerError, StateError
from evener.runtime.checkpoints import folder as folders
from evener.runtime.checkpoints.files import Disk, Files
from evener.runtime.checkpoints.manifest import Manifest, Position
from evener.runtime.checkpoints.saving import Part, Saved, Written, complete, write_part
from evener.runtime.checkpoints.shards import Later
from evener.runtime.checkpoints.staging import Staging
from evener.runtime.ranks import Ranks
from evener.session.checkpoints.save_rule import Keep
from evener.session.meeting import Meeting

POLL_S = 0.02
GRACE_S = 0.2  # for the words why a checkpoint is given up
GIVEN_UP = "the run ended or its devices changed before it was written"


@dataclass(frozen=True, kw_only=True)
class Own:
    """What this device writes: `statistics` is its part of the samples for tensors that are its own.

    `moved_by_forwards` are names of tensors that change before the optimiser moves. What is `later` is copied
    by nobody: it stays as it is until `release` is called.
    `spared` are bytes by folder that the training needs there.
    """

    tensors: dict[str, Tensor]
    moved_by_forwards: frozenset[str] = frozenset()
    statistics: dict[str, float]
    later: dict[str, Later] = field(default_factory=dict)
    spared: dict[Path, int] = field(default_factory=dict)
    release: Callable[[], None] = lambda: None


class Subject(Protocol):
    """What is saved."""

    @property
    def ranks(self) -> Ranks: ...

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...

    def own(self) -> Own: ...

    def manifest(self) -> Manifest:
        """All but number and shards."""
        ...


class Opening(Value, frozen=True, kw_only=True):
    """What the leader tells before the first checkpoint: where, and a token that no earlier writer had."""

    folder: str
    token: str


class Saver:
    """Saves `subject` into the run's folder; made by all its devices together, told by the leader.

    Nothing that goes wrong ends the training: the former checkpoint stays, and `tell` is called, from another
    thread, with the sentence why.
    `seconds` has how long each took beside the training, `waited_s` what the training waited in all,
    `failures` why each that failed did.
    """

    def __init__(
        self,
        subject: Subject,
        run_dir: Path,
        meeting: Meeting,
        keep: Keep,
        tell: Callable[[str], None],
        *,
        name: str = "0",
        files: Files | None = None,
    ) -> None:
        self.subject, self._meeting, self._keep, self._tell = subject, meeting, keep, tell
        self._files = files or Disk()
        self.leads = subject.ranks.rank == 0
        if self.leads:
            place = Path(run_dir).resolve() / folders.FOLDER
            self._clear(place)
            meeting.put(f"checkpoints/{name}", Opening(folder=str(place), token=secrets.token_hex(4)))
        opening = meeting.get(f"checkpoints/{name}", Opening)
        self.folder, self._token = Path(opening.folder), opening.token
        self._staging = Staging(subject.optimizer)
        self._thread: threading.Thread | None = None
        self._given_up = threading.Event()
        self._ending, self._completes = threading.Lock(), False
        self._begin_s = 0.0
        self._release: Callable[[], None] = lambda: None
        self.seconds: list[float] = []
        self.failures: list[str] = []
        self.newest: Path | None = None  # of those that this process completed

    @property
    def is_busy(self) -> bool:
        """Whether a checkpoint is still being written; on the leader, by any device."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def waited_s(self) -> float:
        """Seconds that the training waited for copies to be made."""
        return self._begin_s + self._staging.wait_s

    def begin(self, samples_seen: int) -> None:
        """All devices are between two steps: save what is there now. Waits for an earlier one to end."""
        self.join()
        start = time.monotonic()
        own, refused = Own(tensors={}, statistics={}), ""
        copy: Callable[[], dict[str, Tensor]] = dict
        try:
            own = self.subject.own()
            copy = self._staging.begin(own.tensors, own.moved_by_forwards)
        except EvenerError as e:
            refused = e.what
        except (RuntimeError, MemoryError, OSError) as e:  # a checkpoint that finds no room ends no training
            refused = f"no copy could be begun: {e}"
        self._release = own.release
        ranks = self.subject.ranks
        part = Part(
            partial=self.folder / folders.partial_of(samples_seen, self._token),
            device=ranks.here,
            place=ranks.rank + 1,
            places=ranks.world_size,
            copy=lambda: copy() | own.later,
            statistics=own.statistics,
            pause=lambda: self._pause(own.spared),
        )
        manifest = self.subject.manifest() if self.leads else None
        arguments = (part, samples_seen, manifest, refused)
        self._thread = threading.Thread(target=self._write, args=arguments, daemon=True, name="checkpoint")
        self._thread.start()
        self._begin_s += time.monotonic() - start

    def settle(self) -> None:
        """Return when nothing reads parameters or optimiser state any more: before others change them."""
        self._staging.settle()

    def join(self) -> None:
        """Return when the checkpoint under way is done, on the leader that of all devices."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        """Let go of the optimiser; what is not written by now, here or elsewhere, is given up."""
        with self._ending:
            self._given_up.set()
        self._staging.close()
        if self._thread is not None:
            # One that is being made complete is waited for; a shard that nobody will ask for is not.
            self._thread.join(None if self._completes else GRACE_S)
            self._thread = None
        self._let_go()

    def key(self, word: str) -> str:
        """A key of the job's store that no other saver uses."""
        return f"checkpoints/{self._token}/{word}"

    def _let_go(self) -> None:
        with self._ending:
            release, self._release = self._release, lambda: None
        release()

    def _pause(self, spared: dict[Path, int]) -> None:
        if self._given_up.is_set():
            raise StateError(GIVEN_UP)
        for folder, num_bytes in spared.items():
            free = shutil.disk_usage(folder).free
            if free < num_bytes and folder.stat().st_dev == self.folder.stat().st_dev:
                numbers = f"{free} bytes free, {num_bytes} needed"
                raise StateError(f"the table in {folder} needs the rest of its disk", numbers=numbers)

    def _clear(self, place: Path) -> None:
        try:
            left = folders.remove_partial(self._files, place)
        except OSError as e:
            self._tell(f"unfinished checkpoints in {place} could not be removed: {e.strerror}")
        else:
            if left:
                self._tell(f"removed what was left of {len(left)} unfinished in {place}")

    def _write(self, part: Part, samples_seen: int, manifest: Manifest | None, refused: str) -> None:
        stand_back()
        start = time.monotonic()
        written = Written(error=refused) if refused else write_part(self._files, part)
        self._let_go()
        if written.error:
            written = Written(error=f"{part.device}: {written.error}")
        try:
            self._meeting.put(self.key(f"{samples_seen}/{part.device}"), written)
        except RuntimeError as e:  # the job is over, or its store is; the main thread sees it too
            self._tell(f"{part.device} could not tell of its shard: {e}")
            return
        if manifest is not None:
            saved = self._collected(part.partial, samples_seen, manifest)
            self._report(saved, manifest.position, time.monotonic() - start)

    def _collected(self, partial: Path, samples_seen: int, manifest: Manifest) -> Saved:
        keys = [self.key(f"{samples_seen}/{device}") for device in self.subject.ranks.devices]
        try:
            while not self._meeting.store.check(keys):
                lost = self._meeting.alarm()
                if lost or self._given_up.wait(POLL_S):
                    return Saved(path=None, why=lost or GIVEN_UP)
            written = [self._meeting.get(key, Written) for key in keys]
        except (RuntimeError, EvenerError) as e:
            return Saved(path=None, why=f"the devices could not tell what they wrote: {e}")
        with self._ending:
            if self._given_up.is_set():
                return Saved(path=None, why=GIVEN_UP)
            self._completes = True
        last, every = self._keep.last, self._keep.every
        saved = complete(self._files, partial, manifest, written, keep_last=last, keep_every=every)
        self._completes = False
        return saved

    def _report(self, saved: Saved, position: Position, seconds: float) -> None:
        if saved.path is None:
            self.failures.append(saved.why)
            place = f"{counted(position.samples_seen, 'sample')} (step {position.step})"
            self._tell(f"no checkpoint of {place}: {saved.why}; the training goes on")
            return
        self.seconds.append(seconds)
        self.newest = saved.path
        if saved.why:
            self._tell(f"checkpoint {folders.Checkpoint(saved.path).label}: {saved.why}")
