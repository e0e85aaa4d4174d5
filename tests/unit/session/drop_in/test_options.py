"""Options of groups and a scheduler's numbers go through JSON and come back the same."""

import msgspec
import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler

from evener.errors import StateError, UsageError
from evener.session.drop_in.options import options_of, set_options

MAKE = {
    "step": lambda o: lr_scheduler.StepLR(o, 2),
    "milestones": lambda o: lr_scheduler.MultiStepLR(o, [2, 2, 3]),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 7),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda n: 0.9**n),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=9),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.StepLR(o, 1)], [2]
    ),
}


def optimizer() -> optim.Optimizer:
    first, second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    groups = [{"params": [first], "betas": (0.8, 0.9)}, {"params": [second], "weight_decay": 0.5}]
    return optim.AdamW(groups, lr=0.1)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", MAKE)
def test_a_scheduler_goes_on_where_it_was(kind: str) -> None:
    first = optimizer()
    scheduler = MAKE[kind](first)
    for _ in range(3):
        first.step()
        scheduler.step()
    saved = msgspec.json.decode(msgspec.json.encode(options_of(first, scheduler)))
    second = optimizer()
    other = MAKE[kind](second)
    set_options(saved, second, other)
    for _ in range(3):
        assert [g["lr"] for g in second.param_groups] == [g["lr"] for g in first.param_groups]
        for o, s in ((first, scheduler), (second, other)):
            o.step()
            s.step()
    assert second.param_groups[0]["betas"] == first.param_groups[0]["betas"]
    assert isinstance(second.param_groups[0]["betas"], tuple)


def test_infinities_and_learning_rates_as_tensors() -> None:
    first = optim.SGD([nn.Parameter(torch.zeros(1))], lr=torch.tensor(0.5))
    plateau = lr_scheduler.ReduceLROnPlateau(first)
    saved = msgspec.json.decode(msgspec.json.encode(options_of(first, plateau)))
    second = optim.SGD([nn.Parameter(torch.zeros(1))], lr=torch.tensor(0.1))
    rate = second.param_groups[0]["lr"]
    other = lr_scheduler.ReduceLROnPlateau(second)
    other.best = 0.0
    set_options(saved, second, other)
    assert other.best == float("inf") and second.param_groups[0]["lr"] is rate and float(rate) == 0.5


def test_what_does_not_fit_is_refused() -> None:
    saved = options_of(optimizer())
    with pytest.raises(StateError, match="no learning-rate scheduler"):
        made = optimizer()
        set_options(saved, made, lr_scheduler.StepLR(made, 1))
    with pytest.raises(StateError, match="number of parameter groups"):
        set_options(saved, optim.SGD([nn.Parameter(torch.zeros(1))]))
    set_options({}, optimizer())

    class Odd(lr_scheduler.StepLR):
        def state_dict(self) -> dict:
            return {"history": {"what": object()}}

    made = optimizer()
    with pytest.raises(UsageError, match=r"Odd.history.what is a object"):
        options_of(made, Odd(made, 1))
