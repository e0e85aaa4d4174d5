"""Ends of reductions, with a peer whose clock is made up."""

import pytest
import torch

from evener.core.figures import line
from evener.core.fleet import Device, Fleet, Link
from evener.rehearsal.wire import PacedWire, open_wire
from tests.unit.rehearsal.fakes import PRODUCT_S, open_fake, products

HOPS = [line(1e-3, 1e8)] * 2  # 2 · (1 ms + bytes / 2 / 100 MB/s)
SIZE = 10_000
BUFFER_S = 2 * (1e-3 + 40_000 / 2 / 1e8)  # of SIZE float32


class FakePeer:
    """An inner wire with one other member, which launches at the given moments and sends ones."""

    def __init__(self, launches_s: list[float]) -> None:
        self.launches_s = launches_s
        self.fails = False
        self.keys: list[str] = []

    def all_reduce(self, buffer: torch.Tensor, key: str, *, exact_tail: int = 0) -> "FakePeer._Pending":
        self.keys.append(key)
        add = torch.ones_like(buffer)
        if key == "clocks":
            add = torch.zeros_like(buffer)
            for row in range(len(buffer)):
                add[row, 1] = self.launches_s.pop(0)
        return FakePeer._Pending(self, buffer, add)

    class _Pending:
        def __init__(self, peer: "FakePeer", buffer: torch.Tensor, add: torch.Tensor) -> None:
            self.peer, self.buffer, self.add = peer, buffer, add

        def wait(self) -> None:
            if self.peer.fails:
                raise RuntimeError("connection closed by peer")
            self.buffer += self.add


def test_the_last_launch_and_the_link_decide() -> None:
    driver, clock = open_fake()
    peer = FakePeer([driver.now() + 0.07])
    start, buffer = driver.now(), torch.ones(SIZE)
    PacedWire(peer, driver, 0, HOPS).all_reduce(buffer, "3/bucket0").wait()
    assert driver.now() - start == pytest.approx(0.07 + BUFFER_S, abs=1e-9)
    assert clock.now_s >= driver.now()
    assert buffer.tolist() == [2.0] * SIZE
    assert peer.keys == ["3/bucket0", "clocks"]


def test_one_reduction_follows_the_other_on_the_link() -> None:
    driver, _ = open_fake()
    start = driver.now()
    wire = PacedWire(FakePeer([start, start + 1e-3, start + 1.0]), driver, 0, HOPS)
    reductions = [wire.all_reduce(torch.ones(SIZE), str(i)) for i in range(3)]
    ends = []
    for reduction in reductions:
        reduction.wait()
        ends.append(driver.now() - start)
    assert ends == pytest.approx([BUFFER_S, 2 * BUFFER_S, 1.0 + BUFFER_S], abs=1e-9)


def test_a_few_numbers_go_beside_a_bucket() -> None:
    """16 bytes take 2 · 1 ms and are there before the bucket; the next bucket does not wait for them."""
    driver, _ = open_fake()
    start = driver.now()
    wire = PacedWire(FakePeer([start] * 3), driver, 0, HOPS)
    _, tally, second = (wire.all_reduce(torch.ones(size), "") for size in (SIZE, 4, SIZE))
    tally.wait()
    assert driver.now() - start == pytest.approx(2e-3, abs=1e-6)
    second.wait()
    assert driver.now() - start == pytest.approx(2 * BUFFER_S, abs=1e-9)


def test_waiting_for_the_last_first_changes_no_end() -> None:
    driver, _ = open_fake()
    start = driver.now()
    wire = PacedWire(FakePeer([start, start]), driver, 0, HOPS)
    first, last = (wire.all_reduce(torch.ones(SIZE), str(i)) for i in range(2))
    last.wait()
    assert driver.now() - start == pytest.approx(2 * BUFFER_S, abs=1e-9)
    first.wait()
    assert driver.now() - start == pytest.approx(2 * BUFFER_S, abs=1e-9)


def test_a_bucket_launched_in_mid_backward_overlaps_with_the_rest_of_it() -> None:
    driver, clock = open_fake()
    wire = PacedWire(FakePeer([0.0] * 4), driver, 0, HOPS)
    reductions = []

    def backward() -> None:
        products(1, clock)()
        reductions.append(wire.all_reduce(torch.ones(SIZE), "0"))
        products(4, clock)()
        reductions.append(wire.all_reduce(torch.ones(SIZE), "1"))

    for micro_batch in range(2):
        start = driver.now()
        driver.run(f"0B{micro_batch}", backward)
        assert driver.now() - start == pytest.approx(5 * PRODUCT_S, abs=TICKS if micro_batch == 0 else 1e-9)
        reductions[-2].wait()  # launched at 2 ms, there at 4.4 ms, before the backward's 10 ms
        assert driver.now() - start == pytest.approx(5 * PRODUCT_S, abs=TICKS)
        reductions[-1].wait()
    assert driver.now() - start == pytest.approx(5 * PRODUCT_S + BUFFER_S, abs=TICKS)


TICKS = 1e-4


def test_a_lost_peer_is_passed_on() -> None:
    driver, _ = open_fake()
    peer = FakePeer([0.0, 0.0])
    wire = PacedWire(peer, driver, 0, HOPS)
    first, second = (wire.all_reduce(torch.ones(1), str(i)) for i in range(2))
    peer.fails = True
    with pytest.raises(RuntimeError, match="closed by peer"):
        second.wait()
    with pytest.raises(RuntimeError, match="closed by peer"):
        first.wait()


def test_opened_from_a_fleet() -> None:
    driver, _ = open_fake()
    names = ("b/y", "a/x")
    fleet = Fleet(
        devices=tuple(Device(name=n, kind="k") for n in names), links=(Link(a="a", b="b", curve=HOPS[0]),)
    )
    peer = FakePeer([])
    peer.all_reduce = lambda buffer, key, **_: FakePeer._Pending(peer, buffer, torch.zeros_like(buffer))  # type: ignore
    start = driver.now()
    open_wire(peer, driver, fleet, names).all_reduce(torch.ones(SIZE), "0").wait()
    assert driver.now() - start == pytest.approx(BUFFER_S, abs=1e-9)
