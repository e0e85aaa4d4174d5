"""Where the processes of a job meet: a store for files and failures, then a group for sums.

Works alike under `evener train` and under torchrun: both set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from datetime import timedelta
from functools import cache
from itertools import count
from typing import TypeVar

import msgspec
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from evener.core.figures import Value
from evener.core.files import decode, encode
from evener.errors import EnvironmentBrokenError, EvenerError, PeerLostError
from evener.runtime.ranks import PATIENCE
from evener.session.launched import is_launched
from evener.session.sockets import GroupSockets, shut_sockets

T = TypeVar("T")
OUTCOME, FINISHED = "outcome", "finished"  # what the leading process puts at the end
BEGUN = "begun"  # put once all are ready for the first step: from then on a lost device ends no elastic job
OVER = "over"  # put by who serves the store before it ends on purpose: then nobody goes on elsewhere
GUESTS = "guests"  # put once devices have joined from elsewhere
LINGER_S = 1.0  # of a store whose job has ended, until guests have seen it
HOW_TO_JOIN = "how to join"  # a sentence of the process that started the others
POLL_S = 0.01
FOREVER = timedelta(days=365)  # for what takes as long as the training
REGROUP_TIMEOUT = timedelta(seconds=10)  # of those who have just answered a roll
LEAVE_S = 3.0  # to destroy a group takes milliseconds
REACH = timedelta(seconds=20)
"""Of one more connection to a store that has answered: it is there, or gone for good."""
STORE_GONE = "the job's store does not answer any more: who serves it has ended or is cut off"


class Failure(Value, frozen=True, kw_only=True):
    """Why one device's process ended early."""

    device: str
    code: str
    exit_code: int
    what: str
    numbers: str = ""
    remedy: str = ""

    def as_error(self) -> EvenerError:
        """The same as an error of the right class."""
        kinds: list[type[EvenerError]] = [EvenerError, *EvenerError.__subclasses__()]
        kind = next((k for k in kinds if k.code == self.code), EvenerError)
        return kind(self.what, numbers=self.numbers, remedy=self.remedy)


class Meeting:
    """One process's side of the job's store. Everything in it is JSON, bounded in size and checked.

    `within(name)` is the same meeting in a room of its own, where keys and groups collide with no others.
    `alarm()` says why nobody should be waited for any longer; None while all is well.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self.store, self.rank, self.world_size = store, rank, world_size
        self.sockets = GroupSockets()
        self.alarm: Callable[[], str | None] = lambda: None
        self._is_over = threading.Event()
        self._entrance = store  # where failures are told, whatever room this is
        self._patience = PATIENCE
        self.at = ""  # where a standby serves this store, "host:port"; the job's first one otherwise

    def within(self, name: str) -> "Meeting":
        """This meeting with keys of its own; failures are still told to all."""
        room = copy(self)
        room.store = dist.PrefixStore(name, self.store)
        return room

    def connect(self) -> dist.Store:
        """The job's store over a connection of its own, for another thread or for one group."""
        return self._entrance.clone()  # type: ignore[attr-defined]

    def connected(self) -> "Meeting":
        """This meeting over connections of its own, for another thread."""
        other = copy(self)
        other.store = self.store.clone()  # type: ignore[attr-defined]
        other._entrance = self._entrance.clone()  # type: ignore[attr-defined]
        return other

    def move_to(self, store: dist.Store, at: str) -> None:
        """From now on meet at the standby that serves `store` at `at`; not for a meeting within this one."""
        self.store = self._entrance = store
        self.at, self._is_over = at, threading.Event()

    def answers(self) -> bool:
        """Whether the store can be asked."""
        try:
            return not self._is_over.is_set() and (self._entrance.check([BEGUN]) or True)
        except RuntimeError:
            return False

    def is_told(self, key: str) -> bool:
        """Whether `key` was put for all, in whatever room this is."""
        return self._entrance.check([key])

    def cut_off(self) -> None:
        """End all connections to the store: nothing comes over them, and a call would wait for minutes."""
        self._is_over.set()
        port = getattr(_ground(self._entrance), "port", None)
        shut_sockets(lambda connection: connection.raddr.port == port)

    def put(self, key: str, value: object) -> None:
        self.store.set(key, encode(value))  # type: ignore[arg-type]  # bytes are taken

    def has(self, key: str) -> bool:
        """Whether `key` was put."""
        return self.store.check([key])

    def get_unless(self, key: str, shape: type[T], other: str) -> T | None:
        """The value another process put under `key`, however long that takes; None once `other` is put."""
        while not self.has(key):
            if self.has(other):
                return None
            time.sleep(POLL_S)
        return self.get(key, shape)

    def get(self, key: str, shape: type[T], timeout: timedelta = PATIENCE) -> T:
        """The value another process put under `key`; waits for it, and no longer than the job lives."""
        end = time.monotonic() + timeout.total_seconds()
        try:
            while not self.has(key):
                failure = self.first_failure()
                if failure:
                    raise PeerLostError(f"{failure.device} failed while {key} was awaited")
                alarm = self.alarm()
                if alarm:
                    raise PeerLostError(f"{alarm} while {key} was awaited")
                if time.monotonic() > end:
                    raise PeerLostError(f"nobody told {key} within {timeout.total_seconds():.0f} s")
                time.sleep(POLL_S)
            return decode(self.store.get(key), shape, f"the job's {key}")
        except RuntimeError as e:
            raise PeerLostError(
                f"{self.alarm() or STORE_GONE}, while {key} was awaited",
                numbers=str(e).partition("\n")[0],
                remedy="look for the first error of the process that serves it, and at the network",
            ) from e

    def goes_on(self) -> bool:
        """Whether the job may go on without this process; also where nothing is known as it is cut off."""
        try:
            return self._is_over.is_set() or self._entrance.check([BEGUN])
        except RuntimeError:
            return True

    def report_failure(self, failure: Failure) -> None:
        """Tell the others why this process ends; the first one to do so is the cause.

        Where the store is gone, nobody is left to be told.
        """
        with suppress(RuntimeError):
            order = self._entrance.add("failures", 1)
            self._entrance.set(f"failure/{order}", encode(failure))  # type: ignore[arg-type]  # bytes are taken

    def first_failure(self) -> Failure | None:
        """The failure told first, if any. A store that was cut off is not asked: it would connect anew."""
        return None if self._is_over.is_set() else read_failure(self._entrance)

    def wait_for_failure(self, seconds: float = 2.0) -> Failure | None:
        """The failure told first; the device that failed may need a moment to tell."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self._is_over.is_set():
            failure = self.first_failure()
            if failure:
                return failure
            time.sleep(0.02)
        return None

    def join_group(self, rank: int, world_size: int, backend: str, patience: timedelta = PATIENCE) -> None:
        """Form the group of this room as its process `rank` of `world_size`.

        Over a connection of its own, so that waiting for a device that never comes can be ended. Gloo waits
        for one that is gone by now as if it were to come: PeerLostError after `patience`, here and in
        `new_group`.
        """
        self._patience = patience
        own = self.store.clone()  # type: ignore[attr-defined]
        own.set_timeout(patience)
        with self._forming():
            dist.init_process_group(
                backend,
                store=dist.PrefixStore("group", own),
                rank=rank,
                world_size=world_size,
                timeout=patience,
            )
            _be_patient(dist.group.WORLD)
        own.set_timeout(PATIENCE)  # NCCL waits for its id at the first sum, as long as its store says

    def new_group(self, ranks: Sequence[int], backend: str | None = None) -> dist.ProcessGroup:
        """The group of some processes of the group that was joined; made by all of them together.

        Of the backend of that group where none is named.
        """
        with self._forming():
            group = dist.new_group(list(ranks), backend=backend, timeout=self._patience)
            if self.rank in ranks:
                _be_patient(group)
            return group

    @contextmanager
    def _forming(self) -> Iterator[None]:
        start = time.monotonic()
        with self.sockets.opening():
            try:
                yield
            except RuntimeError as e:
                waited = timedelta(seconds=time.monotonic() - start)
                if waited < self._patience:
                    raise
                raise PeerLostError(
                    f"a group of devices did not come together within {waited.total_seconds():.0f} s",
                    numbers=str(e).partition("\n")[0],
                ) from e

    def leave_group(self) -> None:
        """Leave the group and all that were made in it.

        Gloo now and then goes on sending although its connections are gone, and its group waits for that when
        it is destroyed: then a thread is left to wait, with the group's memory.
        """
        if dist.is_initialized():
            leaving = threading.Thread(target=dist.destroy_process_group, name="leaving a group", daemon=True)
            leaving.start()
            leaving.join(LEAVE_S)
        self.sockets.forget()


def _be_patient(group: dist.ProcessGroup | None) -> None:
    """Once formed, a group's sums take as long as the work of the slowest device."""
    _set_pg_timeout(PATIENCE, group)


def _ground(store: dist.Store) -> dist.Store:
    """The store below all prefixes."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def read_failure(store: dist.Store) -> Failure | None:
    """The failure told first to `store`, None if there is none or the store is gone."""
    try:
        if not store.check(["failure/1"]):
            return None
        return msgspec.json.decode(store.get("failure/1"), type=Failure)
    except (RuntimeError, msgspec.DecodeError):
        return None


def store_at(host: str, port: int, timeout: timedelta) -> dist.Store:
    """A connection to the store at `host`:`port`; RuntimeError where it does not answer in time."""
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)


def serve_store(host: str) -> tuple[dist.TCPStore, int]:
    """A store that listens at `host` alone, and its port: torch's own choice is every interface.

    EnvironmentBrokenError where this host has no such address.
    """
    try:
        listening = socket.create_server((host, 0))
    except OSError as e:
        raise EnvironmentBrokenError(
            f"the devices of this job cannot meet at {host}: {e.strerror or e}",
            remedy="an address of this host, as `ip addr` shows them",
        ) from e
    port = listening.getsockname()[1]
    store = dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )
    return store, port


_numbers = count(1)  # of the meetings that this process opened


def open_meeting() -> Meeting:
    """The meeting that the environment describes; of this process alone where it describes none.

    Each call opens another one, with keys of its own: the processes of a job may train again. The first one's
    are the store's own, where `evener train` looks for the outcome.
    """
    if not is_launched():
        return Meeting(dist.HashStore(), 0, 1)
    store, rank, world_size = _launchers_store()
    own, number = store.clone(), next(_numbers)  # type: ignore[attr-defined]
    return Meeting(own if number == 1 else dist.PrefixStore(f"meeting {number}", own), rank, world_size)


@cache
def _launchers_store() -> tuple[dist.Store, int, int]:
    """(store of all processes of the job, this one's rank, their number).

    Kept until this process ends: the first one may be who serves it.
    """
    try:
        store, rank, world_size = next(dist.rendezvous("env://"))
    except (ValueError, RuntimeError) as e:
        raise EnvironmentBrokenError(
            f"the processes of the job cannot meet: {e}",
            numbers=", ".join(f"{k}={os.environ.get(k)}" for k in ("MASTER_ADDR", "MASTER_PORT", "RANK")),
            remedy="start with torchrun or evener train; check the address and that the port is free",
        ) from e
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    if attempt is not None:
        # torchrun keeps its store when it starts processes again: what was told before must not be read.
        store = dist.PrefixStore(f"attempt {attempt} of {world_size}", store)
    store.set_timeout(REACH)
    return store, rank, world_size
