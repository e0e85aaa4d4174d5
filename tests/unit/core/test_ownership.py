"""Whose values are whose, and how long they take to their owners and back."""

import random
from collections import Counter

import pytest
from msgspec.structs import replace

from evener.core.collectives import all_reduce_seconds, ring
from evener.core.figures import line
from evener.core.fleet import Device, Fleet, Link
from evener.core.ownership import check_owners, handover, held_by, owned_parts, owned_spans, units_of
from evener.core.plan import Ownership, Pipeline, Plan, Reduction, Share, Stage
from evener.errors import PlanMismatchError

NAMES = ("a/0", "a/1", "a/2")
OWNER = Ownership(layer="x", parts={"a/0": 5, "a/1": 3, "a/2": 2})


def fleet_of(names: tuple[str, ...], *links: Link) -> Fleet:
    return Fleet(devices=tuple(Device(name=n, kind="k") for n in names), links=links)


def inside(host: str = "a", **more) -> Link:
    return Link(a=host, b=host, curve=line(1e-3, 1e9), **more)


def pipeline(name: str, samples: int) -> Pipeline:
    return Pipeline(
        samples=samples,
        micro_batch=1,
        stages=(Stage(layers=("x", "y"), shares=(Share(devices=(name,), samples=1),)),),
    )


PLAN = Plan(
    global_batch=4, pipelines=(pipeline("a/0", 3), pipeline("a/1", 1), pipeline("a/2", 0)), owners=(OWNER,)
)


def test_five_three_two_of_ten() -> None:
    assert owned_spans(OWNER, NAMES, 10) == {"a/0": (0, 5), "a/1": (5, 8), "a/2": (8, 10)}
    assert owned_spans(OWNER, ("a/0", "b/0", "a/1", "a/2"), 10)["b/0"] == (5, 5), "no part, no values"
    assert owned_parts(OWNER) == {"a/0": 0.5, "a/1": 0.3, "a/2": 0.2}


def test_layers_in_a_row_with_the_same_owners_travel_together() -> None:
    sizes = {"p": 3, "q": 4, "r": 4, "s": 20, "t": 0, "u": 1}
    owners = [Ownership(layer=n, parts={"a/0": 5, "a/1": 3}) for n in sizes]

    def units(owners: list[Ownership]) -> list[str]:
        return ["".join(o.layer for o in unit) for unit in units_of(owners, sizes, 8)]

    assert units(owners) == ["pq", "r", "s", "u"]
    assert units([owners[0], replace(owners[1], held="gradients"), *owners[2:]])[:3] == ["p", "q", "r"]
    assert units([owners[0], replace(owners[1], parts={"a/0": 1}), *owners[2:]])[:3] == ["p", "q", "r"]
    assert units([]) == []


def test_the_largest_owner_takes_its_part_from_all_others() -> None:
    """10 MB at 1 ms + 1 GB/s: 5 MB from each of two, 12 ms; the first sends 3 + 2 MB, 7 ms."""
    over = handover(OWNER.parts, fleet_of(NAMES, inside()), adds=True)
    assert over.seconds(10e6) == pytest.approx(0.012)
    assert over.seconds(0) == 0.0


def test_equal_parts_there_and_back_take_what_a_ring_does() -> None:
    fleet = fleet_of(NAMES, inside())
    there, back = (handover(dict.fromkeys(NAMES, 1), fleet, adds=x) for x in (True, False))
    whole = all_reduce_seconds(9e6, ring(fleet, NAMES))
    assert there.seconds(9e6) + back.seconds(9e6) == pytest.approx(whole)


def test_a_bus_and_a_link_between_hosts_are_shared() -> None:
    """On a bus all 6 messages of 1 MB go by it one after another; so do the 4 into and out of a host."""
    parts = dict.fromkeys(NAMES, 1)
    assert handover(parts, fleet_of(NAMES, inside(bus="pcie")), adds=True).seconds(3e6) == pytest.approx(
        0.012
    )
    names = ("a/0", "a/1", "b/0", "b/1")
    between = Link(a="a", b="b", curve=line(1e-3, 1e9))
    over = handover(dict.fromkeys(names, 1), fleet_of(names, inside(), inside("b"), between), adds=False)
    assert over.seconds(4e6) == pytest.approx(0.008), "2 devices of a send 1 MB to each of b's 2"


@pytest.mark.parametrize("seed", range(8))
def test_alike_devices_are_counted_as_each_alone(seed: int) -> None:
    """Against every message counted by itself."""
    draw = random.Random(seed)
    names = tuple(f"{h}/{i}" for h in "abc" for i in range(draw.randint(1, 3)))
    links = [inside(h, bus=draw.choice((None, "pcie"))) for h in "abc"]
    links += [Link(a=x, b=y, curve=line(1e-4, draw.choice((1e8, 3e8)))) for x, y in ("ab", "bc", "ac")]
    links += [Link(a="a/0", b="b/0", curve=line(1e-5, 2e9))] if draw.random() < 0.5 else []
    fleet = fleet_of(names, *links)
    parts = {n: draw.choice((0, 1, 1, 4)) for n in names} | {"a/0": 2}
    whole, busy = sum(parts.values()), Counter()
    for target, part in parts.items():
        for source in names if part else ():
            link = fleet.link(source, target)
            if source != target and link is not None:
                for way, end in (("out", source), ("in", target)):
                    host = fleet.device(end).host
                    own = link.a == link.b or end in (link.a, link.b)
                    port = (link.bus, host) if link.bus else (end if own else host,)
                    busy[(way, *port)] += link.curve.seconds(part / whole * 1e6)
    assert handover(parts, fleet, adds=False).seconds(1e6) == pytest.approx(max(busy.values()))


def test_gradients_go_by_the_curve_of_reductions() -> None:
    fleet = fleet_of(NAMES[:2], inside(reduce_curve=line(2e-3, 1e9)))
    parts = {"a/0": 1, "a/1": 0}
    assert handover(parts, fleet, adds=True).seconds(1e6) == pytest.approx(0.003)
    assert handover(parts, fleet, adds=False).seconds(1e6) == pytest.approx(0.002)


def test_what_no_link_joins_takes_no_time() -> None:
    assert handover(OWNER.parts, fleet_of(NAMES), adds=True).seconds(1e6) == 0.0


def test_the_most_that_any_layer_keeps_in_parts() -> None:
    assert held_by(replace(PLAN, owners=())) is None
    other = Ownership(layer="y", parts={"a/0": 1}, held="parameters")
    assert held_by(PLAN) == "optimizer" and held_by(replace(PLAN, owners=(OWNER, other))) == "parameters"
    check_owners(PLAN, ("x", "y"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"owners": (OWNER, OWNER)}, "x twice"),
        ({"owners": (replace(OWNER, layer="z"),)}, "z, no layers"),
        ({"owners": (Ownership(layer="x", parts={"b/0": 1}),)}, "b/0, which have no pipeline"),
        ({"reductions": (Reduction(devices=NAMES, transport="gloo"),)}, "not over reductions"),
    ],
)
def test_owners_that_cannot_be_carried_out_are_refused(change, said) -> None:
    with pytest.raises(PlanMismatchError, match=said):
        check_owners(replace(PLAN, **change), ("x", "y"))


def staged(held: str, *cuts: str, schedule: str = "1f1b", **parts: int) -> Plan:
    """Pipelines of stages of one layer each; "ab" has its x on a, its y on b. `parts` are those of x."""
    pipelines = tuple(
        Pipeline(
            samples=2,
            micro_batch=1,
            stages=tuple(
                Stage(layers=(n,), shares=(Share(devices=(d,), samples=1),))
                for n, d in zip("xy", cut, strict=True)
            ),
        )
        for cut in cuts
    )
    owner = Ownership(layer="x", parts=parts, held=held)  # type: ignore[arg-type]
    return Plan(global_batch=2 * len(cuts), pipelines=pipelines, schedule=schedule, owners=(owner,))


def test_owners_of_a_plan_of_stages_hold_the_layer() -> None:
    check_owners(staged("optimizer", "ab", "cd", a=3, c=1), ("x", "y"))
    check_owners(staged("optimizer", "ab", "ba", a=3, b=1), ("x", "y"))
    check_owners(staged("gradients", "ab", "cd", a=3, c=1, b=0), ("x", "y"))
    with pytest.raises(PlanMismatchError, match="b of x, which they do not hold"):
        check_owners(staged("optimizer", "ab", "cd", a=3, b=1), ("x", "y"))


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (staged("parameters", "ab", "cd", a=1), "several micro-batches are alive at once"),
        (staged("gradients", "ab", "ba", a=1), "a, b has several stages"),
        (staged("gradients", "ab", "cd", a=1, schedule="zero-bubble"), "two halves"),
    ],
)
def test_what_stages_cannot_hold_in_parts_is_refused_with_its_reason(plan: Plan, said: str) -> None:
    with pytest.raises(PlanMismatchError, match=said) as e:
        check_owners(plan, ("x", "y"))
    assert "optimizer" in e.value.remedy
