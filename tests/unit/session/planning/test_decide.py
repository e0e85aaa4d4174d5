"""What is refused when what was asked for becomes a plan."""

import dataclasses
from typing import Any, cast

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from evener.core.figures import Figure
from evener.core.fleet import Device, Fleet
from evener.core.plan import Pipeline, Plan, Share, Stage
from evener.core.profile import Profile
from evener.errors import DataError, PlanMismatchError, UsageError
from evener.session.planning.agreed import prepared
from evener.session.planning.decide import check_plan, choose_plan, other_batch
from evener.session.planning.measure import profile_together
from evener.session.recipe import Recipe, in_dtype
from evener.session.request import Request
from tests.unit.planner.small import linear_profile

NOWHERE = NOBODY = cast(Any, None)
ONE = Fleet(devices=(Device(name="lab/a", kind="cpu"),))


def recipe(samples: int, global_batch: int) -> Recipe:
    return Recipe(
        model=nn.Linear(2, 2),
        dataset=[(torch.zeros(2), torch.zeros(2))] * samples,
        loss=nn.MSELoss(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        global_batch=global_batch,
    )


def plan(global_batch: int) -> Plan:
    stage = Stage(layers=("line",), shares=(Share(devices=("lab/a",), samples=global_batch),))
    pipeline = Pipeline(samples=global_batch, micro_batch=global_batch, stages=(stage,))
    return Plan(global_batch=global_batch, pipelines=(pipeline,))


def test_a_dataset_smaller_than_the_batch_is_refused_before_the_first_step() -> None:
    """It trained, and then the report said that there was no step to tell of."""
    few, whole = recipe(5, 8), recipe(8, 8)
    with pytest.raises(DataError) as caught:
        check_plan(plan(8), ONE, few)
    assert caught.value.numbers == "5 samples, global batch 8"
    assert "--batch 5 or less" in caught.value.remedy
    with pytest.raises(DataError, match="smaller than one global batch"):
        choose_plan(Request(fleet=ONE, run_dir="runs"), ONE, few, Profile(model="m", layers=(), timings=()))
    with pytest.raises(DataError):  # at once, not after measuring
        profile_together(few, NOWHERE, NOBODY, Request(fleet=ONE, run_dir="runs"), (1,))
    check_plan(plan(8), ONE, whole)


def test_a_plan_for_another_batch_is_told_first() -> None:
    with pytest.raises(PlanMismatchError, match="global batch of 4"):
        check_plan(plan(4), ONE, recipe(5, 8))


def test_a_device_left_out_by_an_even_split_is_not_told_of_an_option_nobody_gave() -> None:
    four = Fleet(devices=tuple(Device(name=f"lab/{n}", kind="cpu") for n in "abcd"))
    made = choose_plan(
        Request(fleet=four, run_dir="runs", even=True), four, recipe(8, 3), linear_profile({"cpu": 0.1})
    )
    assert made.samples_by_device() == {"lab/a": 1, "lab/b": 1, "lab/c": 1}
    assert [(x.device, x.reason) for x in made.left_out] == [("lab/d", "the given split gives it no sample")]


def test_more_samples_at_once_than_a_step_has_are_refused_before_measuring() -> None:
    asked = Request(fleet=ONE, run_dir="runs", micro_batch=99999)
    with pytest.raises(UsageError, match="more samples than a step") as refused:
        prepared(recipe(512, 256), asked)
    assert refused.value.numbers == "--micro-batch 99999, global batch 256"
    prepared(recipe(512, 256), Request(fleet=ONE, run_dir="runs", micro_batch=256))


def test_a_model_that_no_device_has_a_rate_for_is_refused_before_anything_is_measured() -> None:
    rate = {"float32": Figure(value=8e9, source="assumed")}
    fleet = Fleet(devices=(Device(name="lab/a", kind="k", flops=rate), Device(name="lab/b", kind="cpu")))
    asked = Request(fleet=fleet, run_dir="runs", rehearse=True)
    prepared(recipe(8, 8), asked)
    with pytest.raises(UsageError, match="cannot be paced") as refused:
        prepared(in_dtype(recipe(8, 8), torch.float64), asked)
    assert refused.value.numbers == "no rate for float64 on lab/a"
    prepared(in_dtype(recipe(8, 8), torch.float64), replace(asked, rehearse=False))


def test_a_loss_module_with_tensors_is_cast_with_the_model() -> None:
    """`evener verify` blamed the model's forward for class weights that had stayed in float32."""
    given = recipe(8, 8)
    given = dataclasses.replace(given, loss=nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0])))
    cast_too = in_dtype(given, torch.float64)
    loss, _ = cast_too.problem.loss_of(torch.zeros(2, 2, dtype=torch.float64), torch.tensor([0, 1]))
    assert loss.dtype == torch.float64
    assert cast_too.problem.weight_of((None, torch.tensor([0, 1])), 2) == 6.0


@pytest.mark.parametrize(("split", "told"), [({"lab/a": 101}, 1), ({"lab/a": 100}, 0), (None, 0)])
def test_a_split_that_is_another_global_batch_is_told(split: dict[str, int] | None, told: int) -> None:
    """Its only trace had been a number in the line of the plan."""
    total = sum(split.values()) if split else 101  # --batch alone is the user's plain word
    request = Request(fleet=ONE, run_dir="", batch_per_device=split, global_batch=total)
    assert len(other_batch(request, 100)) == told
