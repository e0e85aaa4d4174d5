"""A loop over `ev.prepare`'s loader that is left in the middle, in one process."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import evener as ev
from evener.core.fleet import Device, Fleet
from evener.core.plan import Pipeline, Plan, Share, Stage
from evener.session.drop_in.prepare import Prepared

DATA = [(torch.tensor([float(i)]), torch.tensor([0.0])) for i in range(12)]


def prepared() -> tuple[nn.Module, torch.optim.Optimizer, Prepared]:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    made = ev.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.0), DataLoader(DATA, batch_size=4), micro_batch=2
    )
    return model, made.optimizer, made


def turn(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> float | None:
    """One turn of a loop whose loss is the mean output: the gradient is the mean of the batch."""
    optimizer.zero_grad()
    model(x).mean().backward()
    gradient = None if model.weight.grad is None else float(model.weight.grad)
    optimizer.step()
    return gradient


def test_leaving_within_a_global_batch_leaves_no_gradient_behind():
    """The gradient of the turn before the break once went into the next loop's first step."""
    model, optimizer, made = prepared()
    for x, _ in made.loader:
        turn(model, optimizer, x)
        break
    gradients = [turn(model, optimizer, x) for x, _ in made.loader]
    assert gradients == [None, 1.5, None, 5.5, None, 9.5]


def test_a_global_batch_whose_step_was_made_does_not_come_again():
    model, optimizer, made = prepared()
    for number, (x, _) in enumerate(made.loader):
        turn(model, optimizer, x)
        if number == 1:
            break
    assert made.loader.samples_seen == 4
    assert [turn(model, optimizer, x) for x, _ in made.loader] == [None, 5.5, None, 9.5]


def test_a_second_run_after_an_interruption_trains_the_model(tmp_path) -> None:
    """Hooks of the first run once took every gradient of the second, which then moved nothing."""
    model = nn.Linear(1, 1, bias=False)
    stops = [True]

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if stops:
            stops.pop()
            raise KeyboardInterrupt
        return (output - target).square().mean()

    recipe = ev.Recipe(
        model=model,
        dataset=DATA,
        loss=loss,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.01),
        global_batch=4,
    )
    stage = Stage(layers=("model",), shares=(Share(devices=("lab/cpu",), samples=4),))
    plan = Plan(global_batch=4, pipelines=(Pipeline(samples=4, micro_batch=4, stages=(stage,)),))
    fleet = Fleet(devices=(Device(name="lab/cpu", kind="cpu", threads=1),))
    with pytest.raises(KeyboardInterrupt):
        ev.train(recipe, steps=1, plan=plan, fleet=fleet, run_dir=tmp_path, quiet=True)
    before = model.weight.item()
    ev.train(recipe, steps=1, plan=plan, fleet=fleet, run_dir=tmp_path, quiet=True)
    assert model.weight.item() != before
