"""What the model holds that depends on the split is in the plan, with what becomes of it."""

import torch
from msgspec.structs import replace
from torch import nn

from evener.core.fleet import Device, Fleet
from evener.runtime.residing.residing import _Outside
from evener.session.planning.decide import choose_plan
from evener.session.planning.inexact import hooked_parts
from evener.session.recipe import Recipe
from evener.session.request import Request
from tests.unit.planner.small import linear_profile


def test_buffers_that_the_model_changes_itself_are_named_with_what_is_saved() -> None:
    """Nobody said that `seen` was one device's share and `biggest` a mean."""
    model = nn.Linear(2, 2)
    for name, value in (("seen", 0), ("biggest", 0.0), ("mask", 1.0)):
        model.register_buffer(name, torch.tensor(value))
    recipe = Recipe(
        model=model,
        dataset=[(torch.zeros(2), torch.zeros(2))] * 8,
        loss=nn.MSELoss(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        global_batch=8,
    )
    fleet = Fleet(devices=(Device(name="lab/a", kind="cpu"),))
    profile = replace(linear_profile({"cpu": 0.1}), moving_buffers=("seen", "biggest", "gone"))
    (said,) = choose_plan(Request(fleet=fleet, run_dir="runs"), fleet, recipe, profile).inexact
    assert "biggest as the mean over devices, weighted by samples" in said
    assert "seen as the first device has it" in said and "mask" not in said and "gone" not in said


def test_hooks_on_gradients_are_named_and_those_of_a_run_are_not() -> None:
    """A clamp met every device's own gradient: the result was another one, in silence."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].weight.register_hook(_Outside("0.weight"))  # evener's own
    model[0].register_forward_hook(lambda module, given, output: None)
    assert hooked_parts(model) == ()
    model[0].bias.register_hook(lambda g: g.clamp(-1, 1))
    model[1].weight.register_post_accumulate_grad_hook(lambda p: None)
    model[2].register_full_backward_hook(lambda module, before, after: None)
    (said,) = hooked_parts(model)
    assert said.startswith("hooks on gradients (0.bias, 1.weight, 2):")
