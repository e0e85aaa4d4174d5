"""Process groups of a plan: made by all devices in one order, each of what its members talk with.

torch makes a group where all processes ask for it at once; two that ask in another order wait for each other.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import evener as ev
from evener.core.fewer import Fewer
from evener.core.fleet import Device, Fleet
from evener.core.plan import Pipeline, Plan, Reduction, Share, Stage
from evener.runtime.hardware import HardwareDriver
from evener.runtime.ranks import Ranks
from evener.session.layout.fewer import open_apart
from evener.session.layout.seat import Seat
from evener.session.layout.sums import gradient_wires
from evener.session.site import Site

NAMES = ("h1/a", "h1/b", "h2/c", "h2/d")
IN_PLAN = ("h2/d", "h1/b", "h1/a", "h2/c")
Made = list[tuple[tuple[int, ...], str]]


class Group:
    """A process group whose members have no memory in common."""

    def allgather(self, *_: Any) -> "Group":
        return self

    def allreduce(self, *_: Any) -> "Group":
        return self

    def wait(self) -> None:
        return


class Meeting:
    """Notes which groups are made, in which order, of what."""

    def __init__(self) -> None:
        self.made: Made = []

    def new_group(self, ranks: list[int], backend: str) -> Group:
        self.made.append((tuple(ranks), backend))
        return Group()


def plan(*reductions: Reduction, fewer: Fewer | None = None) -> Plan:
    pipelines = tuple(
        Pipeline(
            samples=2,
            micro_batch=2,
            stages=(Stage(layers=("0",), shares=(Share(devices=(d,), samples=2),)),),
        )
        for d in IN_PLAN
    )
    return Plan(global_batch=8, pipelines=pipelines, reductions=reductions, fewer=fewer)


def made_by_each(given: Plan, work: Callable[[Seat], Any], types: str = "cpu cpu cpu cpu") -> list[Made]:
    """What each device of the plan makes in `work`; parameters lie on the host whatever the device."""
    fleet = Fleet(
        devices=tuple(Device(name=n, kind=t, type=t) for n, t in zip(NAMES, types.split(), strict=True))
    )
    recipe = ev.Recipe(
        model=nn.Sequential(nn.Linear(2, 2)),
        dataset=[(torch.zeros(2), torch.zeros(2))] * 8,
        loss=nn.functional.mse_loss,
        reduction="mean",
        optimizer=torch.optim.AdamW,
        global_batch=8,
    )
    cpu, found = torch.device("cpu"), []
    for device in fleet.devices:
        meeting = Meeting()
        seat = Seat(
            recipe=recipe,
            plan=given,
            ranks=Ranks(NAMES, device.name),
            site=Site(device, cpu, HardwareDriver(cpu)),
            fleet=fleet,
            meeting=meeting,  # type: ignore[arg-type]
        )
        work(seat)
        found.append(meeting.made)
    return found


BY_HOST = (
    Reduction(devices=("h1/a", "h1/b"), transport="nccl"),
    Reduction(devices=("h2/c", "h2/d"), transport="nccl"),
    Reduction(devices=("h1/a", "h2/c"), transport="gloo", part=0.5),
    Reduction(devices=("h1/b", "h2/d"), transport="gloo", part=0.5),
)


@pytest.mark.parametrize(("how", "every"), [("local", 2), ("delayed", None)])
def test_hosts_that_take_steps_by_themselves_make_all_groups_in_one_order(
    how: Any, every: int | None
) -> None:
    """A plan's own order is not that of processes, by which torch ranks a group: messages went to others."""
    first, *others = made_by_each(plan(*BY_HOST, fewer=Fewer(how=how, every=every)), open_apart)
    assert [ranks for ranks, _ in first[:2]] == [(0, 1), (2, 3)]
    assert {(0, 2), (1, 3)} <= {ranks for ranks, _ in first[2:]}
    assert all(list(ranks) == sorted(ranks) for ranks, _ in first)
    assert all(made == first for made in others)


SETS = (("h1/a", "h1/b"), ("h1/b", "h2/c"), NAMES, ("h2/c", "h2/d"))


def test_sets_of_holders_make_groups_of_what_their_members_talk_with() -> None:
    """Two cards in a job that has a CPU as well: their own library sums, in a group that is of it.

    The group was once of what reaches all, and the cards' sums went to it as if it were of theirs.
    """
    first, *others = made_by_each(plan(), lambda seat: gradient_wires(seat, SETS), "cuda cuda cpu xpu")
    assert first == [((0, 1), "cpu:gloo,cuda:nccl"), ((1, 2), "gloo"), ((2, 3), "gloo")]
    assert all(made == first for made in others)


def test_sums_over_groups_of_hosts_go_by_gloo_inside_too_as_they_come_to_the_host() -> None:
    """Cards of one host were joined by a library that knows no values of the host's: the first sum failed."""
    found = made_by_each(plan(*BY_HOST), lambda seat: gradient_wires(seat, [NAMES]), "cuda cuda cuda cuda")
    wanted = [((0, 1), "gloo"), ((2, 3), "gloo"), ((0, 2), "gloo"), ((1, 3), "gloo")]
    assert all(made == wanted for made in found)
