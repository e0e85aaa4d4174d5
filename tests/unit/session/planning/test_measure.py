"""Measuring a model that a device cannot even load; what is looked at where nothing is measured."""

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from evener.core.fleet import Device
from evener.core.plan import Pipeline, Plan, Share, Stage
from evener.errors import ModelError, OutOfMemoryError
from evener.runtime.hardware import HardwareDriver
from evener.session.planning.measure import check_unmeasured, profile_here
from evener.session.recipe import Recipe
from evener.session.site import Site


class Full(nn.Linear):
    """A layer that finds the device's memory full."""

    def to(self, *args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def test_a_device_that_cannot_hold_the_parameters_is_named_with_what_would_work() -> None:
    recipe = Recipe(
        model=Full(64, 64),
        dataset=[(torch.zeros(64), torch.zeros(64))],
        loss=nn.MSELoss(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        global_batch=1,
    )
    cpu = torch.device("cpu")
    site = Site(Device(name="lab/gpu0", kind="small"), cpu, HardwareDriver(cpu))
    with pytest.raises(OutOfMemoryError, match=r"lab/gpu0 cannot hold(.|\n)*--plan"):
        profile_here(recipe, site, (1,), 1.0)


def masked(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A mean over the positive targets, whose number differs from batch to batch."""
    valid = target > 0
    return ((output - target)[valid] ** 2).mean()


def plan_of(*stages: tuple[str, ...]) -> Plan:
    made = tuple(
        Stage(layers=layers, shares=(Share(devices=(f"lab/{n}",), samples=8),))
        for n, layers in enumerate(stages)
    )
    return Plan(global_batch=8, pipelines=(Pipeline(samples=8, micro_batch=8, stages=made),))


@pytest.mark.parametrize(
    ("weight", "plan", "told"),
    [
        (None, plan_of(("0",), ("1",)), "whether the loss adds up .* no device of the plan holds the whole"),
        (lambda batch: (batch[1] > 0).sum(), plan_of(("0",), ("1",)), "^$"),
        (lambda batch: (batch[1] > 0).sum(), plan_of(("0", "1")), "^$"),
    ],
    ids=["cut", "cut, with a weight", "whole, with a weight"],
)
def test_a_given_plan_says_what_was_not_looked_at(weight: Any, plan: Plan, told: str) -> None:
    recipe, site = unmeasured(weight)
    assert re.search(told, check_unmeasured(recipe, site, plan))


def test_a_loss_that_does_not_add_up_is_refused_under_a_given_plan_too() -> None:
    """With --profile and --plan the gradient was wrong in silence."""
    recipe, site = unmeasured(None)
    with pytest.raises(ModelError, match="no mean over samples"):
        check_unmeasured(recipe, site, plan_of(("0", "1")))


def unmeasured(weight: Any) -> tuple[Recipe, Site]:
    x = torch.randn(64, 4, generator=torch.manual_seed(0))
    recipe = Recipe(
        model=nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
        dataset=TensorDataset(x, x),
        loss=masked,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        global_batch=8,
        weight=weight,
    )
    cpu = torch.device("cpu")
    return recipe, Site(Device(name="lab/0", kind="cpu"), cpu, HardwareDriver(cpu))
