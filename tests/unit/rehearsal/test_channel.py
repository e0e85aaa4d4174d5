"""Arrivals on rehearsed links, against hand-made timelines and the schedules' own clock."""

import pytest
import torch
import torch.distributed as dist

from benchmarks.random_plans import stage
from evener.core.figures import Figure, line
from evener.core.fleet import Device, Fleet, Link
from evener.core.plan import Pipeline, Plan
from evener.core.routes import Routes
from evener.rehearsal.channel import Lines, OwnLines, PacedChannel, SharedLines
from evener.rehearsal.driver import PacedDriver
from evener.runtime.channels.channel import open_channel
from evener.runtime.channels.local import Hub
from evener.runtime.ranks import Ranks
from evener.schedules.costs import Costs, Wire
from evener.schedules.make import make
from evener.schedules.timing import times
from tests.unit.rehearsal.fakes import PRODUCT_S, FakeClock, products

CPU = torch.device("cpu")
NAMES = ("h/a", "h/b", "h/c")
LATENCY_S, MESSAGE_S = 1e-3, 4e-3  # of 4000 bytes at 1 MB/s, latency not included
CURVE = line(LATENCY_S, 1e6)
MESSAGE = (torch.ones(1000),)
TICKS = 1e-4


def fleet(bus: str | None = None) -> Fleet:
    rate = {"float32": Figure(value=1e9, source="assumed")}
    return Fleet(
        devices=tuple(Device(name=n, kind="k", flops=rate) for n in NAMES),
        links=(Link(a="h", b="h", curve=CURVE, bus=bus),),
    )


class Ends:
    """A paced channel a device, all in this process; every device's clock begins at `start_s`."""

    def __init__(self, links: Fleet, buses: Lines | None = None) -> None:
        hub = Hub()
        self.clocks = {n: FakeClock() for n in NAMES}
        self.drivers = {n: PacedDriver(links.device(n), c, c.sleep) for n, c in self.clocks.items()}
        self.channels = {
            n: PacedChannel(
                open_channel(Ranks(NAMES, n), hub=hub, timeout_s=1), self.drivers[n], links, buses
            )
            for n in NAMES
        }
        self.start_s = self.drivers["h/a"].now()

    def meet(self) -> None:
        """All wait for the last one, and time begins anew."""
        self.start_s = max(driver.now() for driver in self.drivers.values())
        for driver in self.drivers.values():
            driver.advance(self.start_s)

    def at(self, name: str) -> float:
        return self.drivers[name].now() - self.start_s

    def work(self, name: str, action: str, num: int) -> None:
        self.drivers[name].run(action, products(num, self.clocks[name]))

    def send(self, source: str, to: str) -> None:
        self.channels[source].send(MESSAGE, to, "k").wait()

    def receive(self, name: str, source: str):
        receiving = self.channels[name].receive(source, "k", device=CPU)
        (got,) = receiving.wait()
        assert got.sum() == 1000
        return receiving


def test_a_message_arrives_after_the_link_and_moves_the_clock() -> None:
    ends = Ends(fleet())
    ends.work("h/a", "0F0", 5)
    ends.send("h/a", "h/b")
    receiving = ends.receive("h/b", "h/a")
    assert receiving.sent_s - ends.start_s == pytest.approx(5 * PRODUCT_S, abs=TICKS)
    assert ends.at("h/b") == pytest.approx(5 * PRODUCT_S + MESSAGE_S + LATENCY_S, abs=TICKS)
    assert ends.drivers["h/b"].now() == receiving.arrival_s
    assert ends.clocks["h/b"].now_s >= receiving.arrival_s, "it also waited on this machine"


def test_a_message_that_is_already_there_costs_nothing() -> None:
    ends = Ends(fleet())
    ends.send("h/a", "h/b")
    ends.work("h/b", "1F0", 20)
    before = ends.at("h/b")
    ends.receive("h/b", "h/a")
    assert ends.at("h/b") == before


def test_one_message_follows_the_other_and_directions_and_pairs_do_not_meet() -> None:
    ends = Ends(fleet())
    for _ in range(3):
        ends.send("h/a", "h/b")
    ends.send("h/a", "h/c")
    ends.send("h/b", "h/a")
    arrivals = [ends.receive("h/b", "h/a").arrival_s - ends.start_s for _ in range(3)]
    assert arrivals == pytest.approx([i * MESSAGE_S + LATENCY_S for i in (1, 2, 3)], abs=1e-9)
    for name, source in (("h/c", "h/a"), ("h/a", "h/b")):
        assert ends.receive(name, source).arrival_s - ends.start_s == pytest.approx(
            MESSAGE_S + LATENCY_S, abs=1e-9
        )


@pytest.mark.parametrize("in_store", [False, True])
def test_pairs_on_one_bus_follow_each_other(in_store: bool) -> None:
    ends = Ends(fleet(bus="pcie"), SharedLines(dist.HashStore()) if in_store else OwnLines())
    for source, to in (("h/a", "h/b"), ("h/b", "h/c"), ("h/c", "h/a")):
        ends.send(source, to)
    arrivals = [
        ends.receive(to, source).arrival_s - ends.start_s
        for source, to in (("h/a", "h/b"), ("h/b", "h/c"), ("h/c", "h/a"))
    ]
    assert arrivals == pytest.approx([i * MESSAGE_S + LATENCY_S for i in (1, 2, 3)], abs=1e-9)


def test_lines_in_a_store_are_taken_by_one_at_a_time() -> None:
    store = dist.HashStore()
    one, other = SharedLines(store), SharedLines(store)
    assert [lines.take("bus", 1.0, 0.5) for lines in (one, other, other, one)] == [1.5, 2.0, 2.5, 3.0]
    assert other.take("bus", 10.0, 0.5) == 10.5
    assert other.take("another", 1.0, 0.5) == 1.5


def test_a_pair_without_a_link_takes_no_time() -> None:
    ends = Ends(Fleet(devices=fleet().devices))
    ends.work("h/a", "0F0", 5)
    ends.send("h/a", "h/b")
    ends.receive("h/b", "h/a")
    assert ends.at("h/b") == ends.at("h/a")


def test_a_pipeline_takes_what_the_schedule_says() -> None:
    """1F1B over three unequal stages: every device ends when the topological pass says, counted or paced."""
    num_products = {"h/a": 4, "h/b": 2, "h/c": 1}
    stages = tuple(stage(layer, (name, 1)) for layer, name in zip("abc", NAMES, strict=True))
    plan = Plan(global_batch=6, pipelines=(Pipeline(samples=6, micro_batch=1, stages=stages),))
    costs = Costs(
        compute_s={
            (i, name, kind, 1): num_products[name] * PRODUCT_S * factor
            for i, name in enumerate(NAMES)
            for kind, factor in (("F", 1), ("B", 2))
        },
        output_bytes=dict.fromkeys(range(3), 4000.0),
        wires={(a, b): Wire(curve=CURVE) for a in NAMES for b in NAMES if a != b},
    )
    schedule = make(plan, name="1f1b")
    computed = times(schedule, Routes(plan), costs)
    ends = Ends(fleet())
    for _ in range(2):  # counted the first time, paced the second
        ends.meet()
        play(ends, {name: list(row) for name, row in schedule.actions.items()}, num_products)
        for name, moments in computed.moments.items():
            end_s = max(m.end_s for m in moments if m.action.type in "FB")
            assert ends.at(name) == pytest.approx(end_s, abs=TICKS), name


def play(ends: Ends, rows: dict[str, list], num_products: dict[str, int]) -> None:
    """Go through all rows as far as what was sent allows, until all are done."""
    sent: set[str] = set()
    while any(rows.values()):
        for name, row in rows.items():
            while row:
                action = row[0]
                way = 1 if action.type.endswith("_F") else -1
                if action.type.startswith("RECV"):
                    source = action.stage - way
                    if f"{source}{action.type[-2:]}{action.micro_batch}" not in sent:
                        break
                    ends.receive(name, NAMES[source])
                elif action.type.startswith("SEND"):
                    ends.send(name, NAMES[action.stage + way])
                    sent.add(f"{action.stage}{action.type[-2:]}{action.micro_batch}")
                elif action.type in ("F", "B"):
                    ends.work(name, str(action), num_products[name] * (1 if action.type == "F" else 2))
                row.pop(0)
