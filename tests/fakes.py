"""Stand-ins for what the runtime is handed: wires between devices of one process, and a clock without time.

device 0   all_reduce(a) ──┐                 the k-th sum of every device is the same sum,
device 1   all_reduce(b) ──┴─► a = b = a+b   whatever its name: just as Gloo pairs them
"""

import threading
from collections.abc import Callable, Hashable
from typing import Any

import torch

from evener.errors import PeerLostError

WAIT_S = 20.0


class Rendezvous:
    """Sums between `world_size` devices of this process: `wire(rank)` is each one's `Wire`.

    Devices may be threads, or one thread that launches for all before it waits. `launched[rank]` lists the
    keys in the order in which that device launched them.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.launched: list[list[str]] = [[] for _ in range(world_size)]
        self._lock = threading.Condition()
        self._buffers: list[dict[int, torch.Tensor]] = []
        self._lost: str = ""

    def wire(self, rank: int) -> "ThreadedWire":
        return ThreadedWire(self, rank)

    def leave(self, why: str) -> None:
        """A device is gone: everybody who waits for a sum, now or later, gets a PeerLostError."""
        with self._lock:
            self._lost = why
            self._lock.notify_all()

    def join(self, rank: int, buffer: torch.Tensor, key: str) -> int:
        with self._lock:
            number = len(self.launched[rank])
            self.launched[rank].append(key)
            if number == len(self._buffers):
                self._buffers.append({})
            members = self._buffers[number]
            members[rank] = buffer
            if len(members) == self.world_size:
                self._sum([members[r] for r in sorted(members)])
                members.clear()
                self._lock.notify_all()
            return number

    def _sum(self, buffers: list[torch.Tensor]) -> None:
        assert len({(b.shape, b.dtype) for b in buffers}) == 1, "Gloo would abort: sizes or dtypes differ"
        with torch.no_grad():
            total = buffers[0].clone()
            for other in buffers[1:]:
                total += other
            for buffer in buffers:
                buffer.copy_(total)

    def wait(self, number: int) -> None:
        with self._lock:
            done = self._lock.wait_for(lambda: self._lost or not self._buffers[number], WAIT_S)
            if self._buffers[number]:
                raise PeerLostError(self._lost if done else f"nobody joined sum {number} in {WAIT_S} s")


class ThreadedWire:
    """One device's end of a `Rendezvous`."""

    def __init__(self, rendezvous: Rendezvous, rank: int) -> None:
        self._rendezvous, self._rank = rendezvous, rank

    def all_reduce(self, buffer: torch.Tensor, key: str, *, exact_tail: int = 0) -> "_Pending":
        return _Pending(self._rendezvous, self._rendezvous.join(self._rank, buffer, key))


class _Pending:
    def __init__(self, rendezvous: Rendezvous, number: int) -> None:
        self._rendezvous, self._number = rendezvous, number

    def wait(self) -> None:
        self._rendezvous.wait(self._number)


def together(work: Callable[[int, ThreadedWire], Any], world_size: int) -> list[Any]:
    """`work(rank, wire)` on a thread per device, results by rank; the first error of any is raised."""
    rendezvous = Rendezvous(world_size)
    results: list[Any] = [None] * world_size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank, rendezvous.wire(rank))
        except BaseException as e:
            errors.append(e)
            rendezvous.leave(f"device {rank} failed: {type(e).__name__}: {e}")

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(1, world_size)]
    for thread in threads:
        thread.start()
    run(0)
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive(), "a device is still waiting"
    if errors:
        raise errors[0]
    return results


class PostOffice:
    """Parcels between devices of this process: `post(name)` is each one's `Post`; see `core/seams.py`."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._waiting: dict[tuple[str, str, int], list[_Sent]] = {}
        self._lost = ""

    def post(self, name: str) -> "OfficePost":
        return OfficePost(self, name)

    def leave(self, why: str) -> None:
        """A device is gone: who waits for a parcel, now or later, gets a PeerLostError."""
        with self._lock:
            self._lost = why
            self._lock.notify_all()

    def hand_in(self, key: tuple[str, str, int], values: torch.Tensor) -> "_Sent":
        with self._lock:
            sent = _Sent(self, values)
            self._waiting.setdefault(key, []).append(sent)
            self._lock.notify_all()
            return sent

    def take(self, key: tuple[str, str, int], room: torch.Tensor) -> None:
        with self._lock:
            self._wait(lambda: bool(self._waiting.get(key)), f"parcel {key}")
            sent = self._waiting[key].pop(0)
            assert sent.values.numel() == room.numel() and sent.values.dtype == room.dtype, "Gloo would abort"
            room.copy_(sent.values)
            sent.is_taken = True
            self._lock.notify_all()

    def taken(self, sent: "_Sent") -> None:
        with self._lock:
            self._wait(lambda: sent.is_taken, "a parcel to be taken")

    def _wait(self, is_done: Callable[[], bool], what: str) -> None:
        done = self._lock.wait_for(lambda: is_done() or self._lost, WAIT_S)
        if not is_done():
            raise PeerLostError(self._lost if done else f"{what} was waited for {WAIT_S} s")


class _Sent:
    def __init__(self, office: PostOffice, values: torch.Tensor) -> None:
        self._office, self.values, self.is_taken = office, values, False

    def wait(self) -> None:
        self._office.taken(self)


class _Asked:
    sent_s: float | None = None

    def __init__(self, take: Callable[[], None]) -> None:
        self.wait = take


class OfficePost:
    """One device's end of a `PostOffice`."""

    def __init__(self, office: PostOffice, name: str) -> None:
        self._office, self._name = office, name

    def send(self, values: torch.Tensor, to: str, tag: int) -> _Sent:
        return self._office.hand_in((self._name, to, tag), values)

    def receive(self, values: torch.Tensor, source: str, tag: int) -> _Asked:
        return _Asked(lambda: self._office.take((source, self._name, tag), values))

    def now(self) -> float | None:
        return None

    def reach(self, since_s: Any, sizes: Any, *, adds: bool) -> None:
        return


class ScriptedDriver:
    """A `Driver` whose clock moves only by `seconds_of[kind of action]`; `ran` lists (action, signature)."""

    def __init__(self, seconds_of: dict[str, float] | None = None) -> None:
        self.seconds_of = seconds_of or {}
        self.ran: list[tuple[str, Hashable]] = []
        self.now_s = 0.0

    def now(self) -> float:
        return self.now_s

    def run(self, action: str, work: Callable[[], Any], *, signature: Hashable = ()) -> Any:
        self.ran.append((action, signature))
        self.now_s += self.seconds_of.get(action.strip("0123456789"), 0.0)
        return work()

    def on_host(self, work: Callable[[], Any]) -> Any:
        return work()

    def on_disk(self, read: int, written: int) -> None:
        self.on_disk_bytes = read, written
