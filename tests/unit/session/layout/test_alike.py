"""Devices that disagree about what they train find out before anything is summed, all with one error."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch import nn

from evener.errors import ReductionMismatchError
from evener.runtime.ranks import Ranks
from evener.session.layout.alike import check_alike
from evener.session.meeting import Meeting

NAMES = ("a/0", "a/1", "b/0")


def checked(models) -> list[str]:
    """What each device is told: "" where all is well."""
    store = dist.HashStore()

    def one(rank: int) -> str:
        meeting = Meeting(store, rank, len(NAMES))
        try:
            check_alike(models[rank], Ranks(NAMES, NAMES[rank]), meeting)
        except ReductionMismatchError as e:
            return str(e)
        return ""

    with ThreadPoolExecutor(len(NAMES)) as threads:
        return list(threads.map(one, range(len(NAMES))))


def model(dtype=torch.float32, width: int = 3, *, frozen: bool = False) -> nn.Module:
    made = nn.Sequential(nn.Linear(2, width, dtype=dtype), nn.Linear(width, 1, dtype=dtype))
    made[1].weight.requires_grad_(not frozen)
    return made


def test_alike_is_silent() -> None:
    assert checked([model(), model(), model()]) == ["", "", ""]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (model(torch.float64), ("'0.weight'", "float32 3 x 2 on a/0, b/0", "float64 3 x 2 on a/1")),
        (model(width=4), ("'0.weight'", "float32 4 x 2 on a/1")),
        (model(frozen=True), ("'1.weight'", "float32 1 x 3, frozen on a/1")),
    ],
    ids=["dtype", "shape", "frozen"],
)
def test_all_are_told_who_differs_and_how(other: nn.Module, words: tuple[str, ...]) -> None:
    told = checked([model(), other, model()])
    assert len(set(told)) == 1
    assert all(word in told[0] for word in words), told[0]
