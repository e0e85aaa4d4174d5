"""Copies of one model: their buffers become one mean, their checksums tell them apart."""

import pytest
import torch
from torch import nn

from evener.runtime.raw import raw
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


STRIDED = {
    "every third": torch.arange(10.0)[::3][:3],
    "one of every third": torch.arange(10.0)[::3][1:2],
    "none of every third": torch.arange(10.0)[::3][:0],
    "a transposed one": torch.arange(6.0).reshape(2, 3).T,
    "one value, expanded": torch.ones(1).expand(4),
}


@pytest.mark.parametrize("name", STRIDED)
def test_checksums_and_bytes_are_those_of_the_values_whatever_their_strides(name: str) -> None:
    tensor = STRIDED[name]
    plain = torch.tensor(tensor.tolist())
    assert checksums({"x": nn.Parameter(tensor)}) == checksums({"x": plain})
    assert bytes(raw(tensor.contiguous()).numpy()) == plain.numpy().tobytes()


def test_bytes_of_what_lies_in_another_order_are_refused() -> None:
    with pytest.raises(AssertionError, match=r"strides \(1, 3\)"):
        raw(STRIDED["a transposed one"])


def test_a_transposed_buffer_becomes_the_mean_where_only_one_device_holds_it() -> None:
    models = []
    for values in (torch.arange(6.0).reshape(2, 3).T, torch.zeros(2, 3).T):
        model = nn.Module()
        model.register_buffer("mean", values.clone(memory_format=torch.preserve_format))
        models.append(model)
    together(lambda rank, wire: average_buffers(models[rank], {"mean": 1.0 - rank}, wire), 2)
    assert torch.equal(models[1].mean, torch.arange(6.0).reshape(2, 3).T)
