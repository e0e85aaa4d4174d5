"""The cases can fail: averaging each device's own mean, as plain code does, is off by known figures."""

import copy

import pytest
import torch

from tests.local.training import Case, base_model, global_batches, plain
from tests.reference import relative_error


def averaged(case: Case) -> list[torch.Tensor]:
    """The gradient of plain data parallelism: the average over devices of each one's own mean."""
    model, start, grads = base_model(case.dtype), 0, []
    x, y = global_batches(case)[0]
    for (samples,) in case.micro_batches:
        mine = copy.deepcopy(model)
        case.loss(mine(x[start : start + samples]), y[start : start + samples]).backward()
        grads.append([p.grad for p in mine.parameters()])
        start += samples
    return [torch.stack(column).mean(0) for column in zip(*grads, strict=True)]


@pytest.mark.parametrize(
    ("case", "error"),
    [
        (Case(micro_batches=((6,), (2,))), 0.565),
        (Case(micro_batches=((4,), (4,)), masked=(1, 2, 3, 4)), 0.656),
    ],
    ids=["K1", "K2"],
)
def test_plain_averaging_is_far_off(case: Case, error: float) -> None:
    assert relative_error(averaged(case), plain(case).gradients[0]) == pytest.approx(error, abs=5e-4)
