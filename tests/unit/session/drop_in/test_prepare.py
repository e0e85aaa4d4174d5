"""A loop over `ev.prepare`'s loader that is left in the middle, in one process."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import evener as ev
from evener.core.fleet import Device, Fleet
from evener.core.plan import Pipeline, Plan, Share, Stage
from evener.errors import UsageError
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


def parts() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader]:
    model = nn.Linear(1, 1, bias=False)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(DATA, batch_size=4)


@pytest.mark.parametrize("micro_batch", [None, 2])
def test_a_loop_that_never_steps_ends_with_an_error(micro_batch: int | None) -> None:
    """With one turn a global batch it once went through all its data, trained nothing and said nothing."""
    model, _, loader = ev.prepare(*parts(), micro_batch=micro_batch)
    with pytest.raises(UsageError, match=r"without optimizer.step\(\)"):
        for x, _ in loader:
            model(x).mean().backward()


def test_a_loop_may_pass_a_step_by_where_a_turn_is_a_global_batch() -> None:
    model, optimizer, loader = ev.prepare(*parts())
    for turn, (x, _) in enumerate(loader):
        optimizer.zero_grad()
        model(x).mean().backward()
        if turn == 1:
            optimizer.step()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"loader": [1, 2]}, "prepare's loader is a list"),
        ({"model": None}, "prepare's model is a NoneType"),
        ({"optimizer": lambda: None}, "prepare's optimizer is a function"),
        ({"optimizer": torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)}, "not the model's"),
        ({"loader": DataLoader([], batch_size=4, sampler=torch.utils.data.SequentialSampler([]))}, "empty"),
        ({"scaler": True}, r"prepare's scaler is a bool, which has no unscale_\(\)"),
        ({"scheduler": "cosine"}, r"prepare's scheduler is a str, which has no step\(\)"),
        ({"micro_batch": 0}, "micro_batch of 0"),
        ({"micro_batch": 1.5}, "micro_batch of 1.5"),
        ({"batch_per_device": "4"}, "batch_per_device is a str"),
        ({"batch_per_device": [4.0]}, "batch_per_device of 4.0"),
        ({"batch_per_device": (2, 2)}, "2 numbers for 1 device"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_cannot_be_prepared_is_refused_in_words(change: dict, told: str) -> None:
    """These were Python's own errors, or trained nothing."""
    given = dict(zip(("model", "optimizer", "loader"), parts(), strict=True)) | change
    with pytest.raises(UsageError, match=told):
        ev.prepare(**given)


def test_what_was_prepared_is_not_prepared_again() -> None:
    made = ev.prepare(*parts())
    assert (made.loader.batch_size, made.loader.drop_last) == (4, False) and made.loader.dataset is DATA
    with pytest.raises(UsageError, match="prepared already"):
        ev.prepare(*made)


@pytest.mark.parametrize("micro_batch", [None, 2])
def test_a_gradient_scaler_scales_over_turns_and_passes_overflows_by(micro_batch: int | None) -> None:
    """A scaler asserts that there are gradients, which are there in a global batch's last turn alone."""
    model, optimizer, loader = parts()
    nn.init.ones_(model.weight)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    model, optimizer, loader = ev.prepare(model, optimizer, loader, scaler=scaler, micro_batch=micro_batch)
    seen = []
    for turn, (x, _) in enumerate(loader):
        optimizer.zero_grad()
        over = float("inf") if turn == 0 else 1.0
        scaler.scale(model(x).mean() * over).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0)
        scaler.step(optimizer)
        scaler.update()
        seen.append((round(model.weight.item(), 6), scaler.get_scale()))
    last = [s for i, s in enumerate(seen) if micro_batch is None or i % 2]
    assert last == [(1.0, 4.0), (0.45, 4.0), (-0.5, 8.0)]


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_that_was_forgotten_is_told_where_turns_leave_no_gradient(fused: bool) -> None:
    """It ended in torch's assertion, "No inf checks were recorded"."""
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    made = ev.prepare(model, optimizer, DataLoader(DATA, batch_size=4), micro_batch=2)
    with pytest.raises(UsageError, match=r"(?s)GradScaler.*step 0, a turn of 2 of its 4 .*scaler=scaler"):
        for x, _ in made.loader:
            scaler.scale(model(x).mean()).backward()
            scaler.step(optimizer)


@pytest.mark.parametrize("fused", [False, True])
def test_whole_batches_need_no_scaler_named(fused: bool) -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for x, _ in ev.prepare(model, optimizer, DataLoader(DATA, batch_size=4)).loader:
        optimizer.zero_grad()
        scaler.scale(model(x).mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert round(model.weight.item(), 6) == round(1 - 0.1 * (1.5 + 5.5 + 9.5), 6)


def test_a_loop_that_only_looks_at_its_data_is_not_told_to_step() -> None:
    """All its global batches are skipped, which is printed; there was no sum that a step could have used."""
    model, _, loader = ev.prepare(*parts(), micro_batch=2)
    with torch.no_grad():
        assert len([model(x) for x, _ in loader]) == 6


@pytest.mark.parametrize(
    ("more", "told"),
    [({"micro_batch": 2}, 1), ({}, 0), ({"micro_batch": 2, "reduction": "sum"}, 0)],
    ids=["in turns", "whole batches", "a sum"],
)
def test_what_a_loss_is_taken_for_is_said_where_batches_are_split(capfd, more: dict, told: int) -> None:
    """Class weights or ignored labels without weight= gave a gradient that was 7 % off in silence."""
    ev.prepare(*parts(), **more)
    assert capfd.readouterr().err.count("taken as a mean over samples") == told
