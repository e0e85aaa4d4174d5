"""Groups are formed with a patience of their own, and then bear work of any length."""

import gc
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from evener.errors import DataError, EnvironmentBrokenError, PeerLostError
from evener.runtime.wires.messages import Messages
from evener.session import meeting
from evener.session.meeting import Failure, Meeting
from evener.session.worker import telling
from tests.local.pool import Pool

BRIEF = timedelta(seconds=1)
FAILURE = Failure(device="a", code="EV301", exit_code=2, what="no samples")


def store_at(port: int, *, is_master: bool) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", port, is_master=is_master, wait_for_workers=False)


def test_one_who_never_comes_is_waited_for_no_longer_than_said() -> None:
    """A device was stopped while it joined a group; the others left it, and it waited for half an hour."""
    start = time.monotonic()
    with pytest.raises(PeerLostError, match="did not come together within"):
        Meeting(store_at(0, is_master=True), 0, 2).join_group(0, 2, "gloo", BRIEF)
    assert 1.0 <= time.monotonic() - start < 10.0
    assert not dist.is_initialized()


def test_an_address_that_this_host_does_not_have_is_refused() -> None:
    with pytest.raises(EnvironmentBrokenError, match=r"cannot meet at 192\.0\.2\.1: Cannot assign"):
        meeting.serve_store("192.0.2.1")  # of no host: kept for examples


def slow(rank: int, world_size: int, port: int) -> float:
    """Every sum and every message of a group starts later than its members would have been waited for."""
    dist.destroy_process_group()
    room = Meeting(store_at(port, is_master=False), rank, world_size)
    room.join_group(rank, world_size, "gloo", BRIEF)
    group = room.new_group([0, 1])
    values = torch.full((8,), float(rank + 1))
    messages = Messages(group, ["a", "b"], "ab"[rank], 7)
    if rank == 0:
        came = messages.receive("b", messages.expect("b"), values.nbytes, values, 0)
        values += came.view(values.dtype)
    else:
        time.sleep(1.5)
        messages.outgoing("a", values.nbytes).view(values.dtype).copy_(values)
        messages.send("a", values.nbytes, values, 0).wait()
        time.sleep(1.5)
    dist.all_reduce(values)
    if rank == 0:
        time.sleep(1.5)
    dist.all_reduce(values, group=group)
    return float(values[0])


def test_work_in_a_group_may_take_longer_than_forming_it(pool: Pool) -> None:
    store = store_at(0, is_master=True)
    assert pool.run(slow, 2, store.port) == [10.0, 10.0]


def test_a_group_bears_more_of_its_store_than_a_new_connection_may_take() -> None:
    """NCCL waits for its id as long as the store says: half an hour had become 20 s."""
    store = store_at(0, is_master=True)
    store.set_timeout(meeting.REACH)
    room = Meeting(store, 0, 1)
    room.join_group(0, 1, "gloo", BRIEF)
    assert _get_default_store().timeout == meeting.PATIENCE
    room.leave_group()
    assert store.timeout == meeting.REACH


class Stuck:
    """In place of destroying a group: as when Gloo goes on sending over connections that are gone."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()

    def __call__(self) -> None:
        self.goes_on.wait(30.0)


def test_a_group_that_cannot_be_destroyed_is_left_all_the_same(monkeypatch) -> None:
    """A device that was stopped in a sum hung in there; the run ended without it, and its launcher waited."""
    stuck = Stuck()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", stuck)
    monkeypatch.setattr(meeting, "LEAVE_S", 0.2)
    start = time.monotonic()
    Meeting(dist.HashStore(), 0, 1).leave_group()
    assert time.monotonic() - start < 5.0
    stuck.goes_on.set()


def test_a_job_may_meet_again_in_rooms_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second ev.train of one job read what the first had put, and its groups never came together."""
    environment = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    meeting._launchers_store.cache_clear()
    first, second = meeting.open_meeting(), meeting.open_meeting()
    first.put("outcome", 1)
    first.report_failure(FAILURE)
    assert first.first_failure() == FAILURE
    assert second.first_failure() is None
    assert not second.has("outcome")
    meeting._launchers_store.cache_clear()


def test_who_fails_where_the_store_is_gone_raises_what_happened() -> None:
    """The first process had ended with a plain error; the others in frames of C++."""
    store = store_at(0, is_master=True)
    there = Meeting(store_at(store.port, is_master=False), 1, 2)
    del store
    gc.collect()
    with pytest.raises(DataError, match="no samples"), telling(there, "b"):
        raise DataError("no samples")
    with pytest.raises(PeerLostError, match="the job's store does not answer"), telling(there, "b"):
        there.has("anything")
    with pytest.raises(PeerLostError, match=r"the job's store does not answer any more.* while anything"):
        there.get("anything", bool)
    there.alarm = lambda: "a is silent"  # who knows better than the store's end says so
    with pytest.raises(PeerLostError, match="a is silent, while anything was awaited"):
        there.get("anything", bool)
