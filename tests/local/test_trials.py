"""Sums tried on a job's own links: alike on all devices, and in the plan that follows."""

from pathlib import Path

import torch
import torch.distributed as dist
from msgspec.structs import replace

from evener.core.exchange import exchange_of
from evener.core.figures import line
from evener.core.files import read
from evener.core.fleet import Device, Fleet, Link
from evener.cost.exchange import spelled_ring, ways_of
from evener.policy.trials import trials_of
from evener.runtime.wire import GroupWire
from evener.session.launching.launch import launch
from evener.session.planning.trials import with_tried_sums
from tests.faults.jobs import error_of, request_for, split
from tests.local.pool import Pool

NAMES = ("a/0", "a/1", "b/0", "b/1")


def tried_by(rank: int, world_size: int) -> Fleet:
    links = [Link(a=a, b=b, curve=line(1e-4, 1e9)) for a, b in ("aa", "bb", "ab")]
    fleet = Fleet(devices=tuple(Device(name=n, kind="k") for n in NAMES), links=tuple(links))
    trials = trials_of(fleet, NAMES, ("int8",), 3_000_000)

    def new_group(names, backend: str) -> dist.ProcessGroup:
        return dist.new_group([NAMES.index(d) for d in names], backend=backend)

    cpu = torch.device("cpu")
    return with_tried_sums(fleet, trials, NAMES[rank], GroupWire(), new_group, lambda wire: wire, cpu)


def test_all_devices_learn_the_same_seconds_of_every_way(pool: Pool) -> None:
    first, *others = pool.run(tried_by, 4)
    assert all(fleet == first for fleet in others)
    ways, tried = ways_of(first, NAMES, ("int8",)), {w.way for w in first.sums}
    by_links = ways_of(replace(first, sums=()), NAMES, ("int8",))
    assert len(tried) == len(first.sums) >= 5
    for way, formula in zip(ways, by_links, strict=True):
        exchange = exchange_of(way.reductions, NAMES)
        if (exchange.spelled if exchange else spelled_ring(NAMES)) in tried:
            assert way.name == formula.name and 0 < way.seconds(65_536) <= way.seconds(3_000_000)
            assert way.seconds(3_000_000) != formula.seconds(3_000_000), "what was tried goes before"


def test_a_job_on_several_hosts_tries_before_it_plans(tmp_path: Path) -> None:
    names = ("lab/a", "far/b", "far/c")
    request = replace(
        request_for(tmp_path, split(4, 4, 4), steps=4),
        plan=None,
        fleet=Fleet(devices=tuple(Device(name=n, kind="cpu", threads=1) for n in names)),
        shapes="data-parallel",
        keep_all=True,
        profile_s=2.0,
    )
    outcome = launch(request)
    assert error_of(outcome, 4) <= 1e-12
    fleet = read(Path(outcome.run_dir) / "fleet.json", Fleet)
    assert {s.devices for s in fleet.sums} == {names} and {s.curve.source for s in fleet.sums} == {"measured"}
