"""Copies of one model: their buffers become one mean, their checksums tell them apart."""

import pytest
import torch
from torch import nn

from evener.runtime.replicas import average_buffers, checksums
from tests.fakes import together


def holder(statistic: float) -> nn.Module:
    model = nn.Module()
    model.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))
    model.register_buffer("mean", torch.tensor([statistic]))
    return model


@pytest.mark.parametrize(
    ("parts", "mean"),
    [
        (({"mask": 1.0, "mean": 1.0}, {}), 2.0),  # two stages
        (({"mask": 0.75, "mean": 0.75}, {"mask": 0.25, "mean": 0.25}), 3.0),  # two copies
    ],
)
def test_buffers_become_the_mean_of_their_holders_and_infinite_masks_stay(
    parts: tuple[dict[str, float], ...], mean: float
) -> None:
    models = [holder(2.0), holder(6.0)]
    together(lambda rank, wire: average_buffers(models[rank], parts[rank], wire), 2)
    for model in models:
        assert torch.equal(model.mask, holder(0.0).mask)
        assert model.mean.item() == mean


def test_checksums_tell_values_apart_in_every_shape() -> None:
    def of(value: float) -> dict[str, str]:
        return checksums({"scale": nn.Parameter(torch.tensor(value)), "wide": torch.full((2, 3), value).T})

    assert of(1.0) == of(1.0)
    assert all(a != b for a, b in zip(of(1.0).values(), of(-1.0).values(), strict=True))
