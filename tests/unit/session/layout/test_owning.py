"""What --state and --parts make of a plan, and what does not go with owners."""

from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn

import evener as ev
from evener.core.fewer import Fewer
from evener.core.figures import Figure
from evener.core.fleet import Device, Fleet
from evener.core.plan import LeftOut, Ownership, Pipeline, Plan, Share, Stage
from evener.errors import PlanMismatchError, UsageError
from evener.session.layout.owning import check_owned, with_owners
from evener.session.request import Request, may_hold_parts

MIB = 2.0**20


def fleet(*mib: float | None) -> Fleet:
    return Fleet(
        devices=tuple(
            Device(
                name=f"lab/{i}",
                kind=str(i),
                type="cpu",
                memory_bytes=Figure(value=m * MIB, source="assumed") if m else None,
            )
            for i, m in enumerate(mib)
        )
    )


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def plan(devices: int = 3) -> Plan:
    return Plan(
        global_batch=2 * devices,
        pipelines=tuple(
            Pipeline(
                samples=2,
                micro_batch=2,
                stages=(Stage(layers=("0", "1", "2"), shares=(Share(devices=(f"lab/{i}",), samples=2),)),),
            )
            for i in range(devices)
        ),
    )


def two_stages() -> Pipeline:
    """A pipeline over two devices."""
    layers = {"lab/0": ("0",), "lab/1": ("1", "2")}
    return Pipeline(
        samples=6,
        micro_batch=2,
        stages=tuple(Stage(layers=n, shares=(Share(devices=(d,), samples=2),)) for d, n in layers.items()),
    )


def request(given: Plan | None = None, **more: Any) -> Request:
    return Request(fleet=fleet(500, 300, 200), run_dir=".", plan=given, **more)


def recipe(**more: Any) -> ev.Recipe:
    return ev.Recipe(
        model=model(),
        dataset=[(torch.zeros(4), torch.zeros(2))] * 12,
        loss=nn.functional.mse_loss,
        reduction="mean",
        optimizer=torch.optim.AdamW,
        global_batch=6,
        **more,
    )


def test_a_plan_without_owners_gets_parts_by_memory():
    asked = request(plan(), state="gradients")
    found = with_owners(plan(), asked, asked.fleet, model())
    assert [o.layer for o in found.owners] == ["0", "2"]
    assert found.owners[0].parts == {"lab/0": 500, "lab/1": 300, "lab/2": 200}
    assert {o.held for o in found.owners} == {"gradients"} and found.schedule == "1f1b"


def test_memories_that_are_not_known_make_equal_parts():
    found = with_owners(plan(2), request(plan(2), state="optimizer"), fleet(500, None), model())
    assert found.owners[0].parts == {"lab/0": 1, "lab/1": 1}
    assert "1:1 equal, as the memory of lab/1 is not known" in found.why  # it said: by the memory of each


def test_parts_of_ones_own_go_before_the_planners():
    asked = request(None, state="optimizer", parts={"lab/0": 5, "lab/1": 3, "lab/2": 2})
    found = with_owners(plan(), asked, asked.fleet, model())
    assert found.owners[0].parts == {"lab/0": 5, "lab/1": 3, "lab/2": 2}


def test_replicated_state_leaves_a_plan_as_it_is():
    asked = request(plan())
    assert with_owners(plan(), asked, asked.fleet, model()) == plan()
    assert not may_hold_parts(asked) and may_hold_parts(request(plan(), state="optimizer"))


def test_parts_without_anything_in_parts_or_all_0_are_refused():
    parts = {"lab/0": 5, "lab/1": 3, "lab/2": 2}
    with pytest.raises(UsageError, match="--parts says"):
        with_owners(plan(), request(plan(), parts=parts), fleet(1, 1, 1), model())
    with pytest.raises(UsageError, match="all 0"):
        with_owners(
            plan(), request(plan(), state="optimizer", parts=dict.fromkeys(parts, 0)), fleet(1, 1, 1), model()
        )


@pytest.mark.parametrize(
    ("names", "more", "words"),
    [
        (("lab/0", "lab/9"), {}, "lab/9, which have no pipeline"),
        (("lab/0", "lab/1"), {"pipelines": (two_stages(),)}, "lab/1 of 0, which they do not hold"),
    ],
)
def test_a_plan_by_hand_whose_owners_cannot_be_is_no_request(
    names: tuple[str, ...], more: dict[str, Any], words: str
) -> None:
    owners = (Ownership(layer="0", parts=dict.fromkeys(names, 1)),)
    with pytest.raises(PlanMismatchError, match=words):
        request(replace(plan(), owners=owners, **more))


@pytest.mark.parametrize(
    ("held", "change", "words"),
    [
        ("optimizer", {"steal": True}, "stealing"),
        ("parameters", {"schedule": "gpipe"}, "schedule"),
        ("parameters", {"recompute": True}, "recompute"),
        ("parameters", {"precision": "bfloat16"}, "precision"),
        ("parameters", {"batch_norm": "wave"}, "batch_norm"),
        ("optimizer", {"tables": ("emb",)}, "emb"),
    ],
)
def test_what_does_not_go_with_owners_is_refused(held: str, change: dict[str, Any], words: str):
    asked = request(plan(), state=held)
    owned = with_owners(plan(), asked, asked.fleet, model())
    stage = {k: v for k, v in change.items() if k in ("recompute", "precision")}
    if stage:
        pipelines = tuple(replace(p, stages=(replace(p.stages[0], **stage),)) for p in owned.pipelines)
        owned = replace(owned, pipelines=pipelines)
    owned = replace(owned, **{k: v for k, v in change.items() if k in ("steal", "schedule")})
    own = recipe(**{k: v for k, v in change.items() if k == "batch_norm"})
    check_owned(with_owners(plan(), asked, asked.fleet, model()), recipe(), ())
    with pytest.raises(PlanMismatchError, match=words):
        check_owned(owned, own, change.get("tables", ()))


def test_an_owner_that_the_plan_left_out_holds_state_and_takes_no_samples():
    """A small model was planned for one device; `--parts` that named another were refused as a mismatch."""
    one = replace(
        plan(1), left_out=(LeftOut(device="lab/1", reason="slow"), LeftOut(device="lab/2", reason="slow"))
    )
    found = with_owners(
        one, request(state="gradients", parts={"lab/0": 1, "lab/1": 3}), fleet(9, 9, 9), model()
    )
    assert [p.samples for p in found.pipelines] == [2, 0] and found.devices == ("lab/0", "lab/1")
    assert [x.device for x in found.left_out] == ["lab/2"]
    assert all(o.parts == {"lab/0": 1, "lab/1": 3} for o in found.owners)


def test_a_plan_with_fewer_exchanges_gets_no_owners():
    given = replace(plan(), fewer=Fewer(how="local", every=4))
    with pytest.raises(UsageError, match="--state optimizer and the plan's local:4:1:0 exclude each other"):
        with_owners(given, request(given, state="optimizer"), fleet(500, 300, 200), model())


def test_the_sentences_of_a_plan_are_of_the_parts_that_run():
    planned = replace(plan(), why="the optimiser's state in parts 9:9:9 by memory", inexact=("seeds differ",))
    asked = request(None, state="optimizer", parts={"lab/0": 5, "lab/1": 3, "lab/2": 0})
    found = with_owners(planned, asked, asked.fleet, model())
    assert "9:9:9" not in found.why and found.inexact == ("seeds differ",)
    assert found.why.startswith("the optimiser's state in parts 5:3:0 as given, samples 2:2:2 as planned")
    assert found.prediction is None


def test_parts_of_a_plan_of_stages_are_among_those_that_hold_a_layer():
    """Two pipelines: layer 0 on lab/0 and lab/1, layer 2 on lab/0 and lab/2."""

    def stage(device: str, *layers: str) -> Stage:
        return Stage(layers=layers, shares=(Share(devices=(device,), samples=1),))

    cut = Pipeline(samples=3, micro_batch=1, stages=(stage("lab/1", "0"), stage("lab/2", "1", "2")))
    whole = replace(cut, stages=(stage("lab/0", "0", "1", "2"),))
    given = Plan(global_batch=6, pipelines=(whole, cut), schedule="gpipe")
    found = with_owners(given, request(given, state="gradients"), fleet(500, 300, 200), model())
    assert {o.layer: o.parts for o in found.owners} == {
        "0": {"lab/0": 500, "lab/1": 300},
        "2": {"lab/0": 500, "lab/2": 200},
    }
    assert found.schedule == "gpipe"
    with pytest.raises(UsageError, match="hold 0 are 0"):
        asked = request(given, state="optimizer", parts={"lab/0": 0, "lab/1": 0, "lab/2": 1})
        with_owners(given, asked, fleet(500, 300, 200), model())
    alone = Plan(global_batch=6, pipelines=(two_stages(),))
    with pytest.raises(UsageError, match="no layer on several devices"):
        with_owners(alone, request(alone, state="optimizer"), fleet(500, 300, 200), model())
