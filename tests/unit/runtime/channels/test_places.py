"""Which transport joins two places, and why."""

import itertools

import msgspec
import pytest
import torch.distributed as dist

from evener.errors import FileError, PeerLostError
from evener.runtime.channels.places import Place, announce, choose_transport, find, this_host


def place(device: str = "h/a", process: str = "p", host: str = "boot:1", address: str = "evener-1") -> Place:
    return Place(
        device=device, process=process, host=host, address=address, door="127.0.0.1 80", token="0" * 32
    )


@pytest.mark.parametrize(
    ("other", "name", "why"),
    [
        (place("h/b"), "local", "h/a and h/b run in one process: tensors are handed over"),
        (
            place("h/b", "q"),
            "shared",
            "h/a and h/b are on one host: shared memory, announced over a unix socket",
        ),
        (
            place("g/b", "q", "boot:2"),
            "tcp",
            "h/a and g/b are on different hosts: TCP, through host memory",
        ),
        (place("h/b", "q", ""), "tcp", "h/a and h/b cannot tell whether they share a host: TCP"),
        (
            place("h/b", "q", address=""),
            "tcp",
            "h/a and h/b are on one host that lacks shared memory by file descriptor: TCP",
        ),
    ],
)
def test_choice_and_reason(other: Place, name: str, why: str) -> None:
    assert choose_transport(place(), other) == (name, why)


def test_both_ends_choose_alike() -> None:
    kinds = [
        place(p, p, h, a) for p, h, a in itertools.product(("p/x", "q/x"), ("", "b:1", "b:2"), ("", "e"))
    ]
    for a, b in itertools.product(kinds, kinds):
        assert choose_transport(a, b)[0] == choose_transport(b, a)[0]


def test_the_host_is_known_and_stays_the_same() -> None:
    assert this_host() and this_host() == this_host()


def test_a_place_is_found_in_the_store() -> None:
    store = dist.HashStore()
    announce(place(), store)
    assert find("h/a", store, 1.0) == place()


def test_a_device_that_says_nothing_is_named() -> None:
    with pytest.raises(PeerLostError, match=r"h/z did not open its channel within 0.01 s"):
        find("h/z", dist.HashStore(), 0.01)


@pytest.mark.parametrize(
    "change",
    [{"address": "../x"}, {"door": "127.0.0.1"}, {"door": "::1 70000"}, {"door": "x 1"}, {"token": "0" * 31}],
)
def test_nonsense_in_the_store_is_refused(change: dict) -> None:
    store = dist.HashStore()
    raw = msgspec.to_builtins(place()) | change
    store.set("channel/h/a", msgspec.json.encode(raw).decode())
    with pytest.raises(FileError, match="h/a says"):
        find("h/a", store, 1.0)
