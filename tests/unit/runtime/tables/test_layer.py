"""A stand-in looks up what the layer in its place would, with the same gradients, and says what is wrong."""

from typing import Any

import pytest
import torch
from torch import nn

from evener.errors import DataError, ModelError, UnknownNameError
from evener.runtime.tables.layer import place_table, put_back, table_layers
from evener.runtime.tables.table import Table, summed


def compared(layer: nn.Module, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Table gradients (ours, torch's) of a weighted sum of the output; the outputs are compared at once."""
    model = nn.Sequential(layer)
    weight: Any = layer.weight
    want = layer(*args, **kwargs)
    factors = torch.randn(want.shape, generator=torch.Generator().manual_seed(3))
    (want * factors).sum().backward()
    theirs = weight.grad.to_dense() if weight.grad is not None else torch.zeros_like(weight)
    table = place_table(model, "0").table
    table.begin(1.0)
    got = model[0](*args, **kwargs)
    torch.testing.assert_close(got, want)
    if got.requires_grad:
        (got * factors).sum().backward()
    table.sum_up()
    return gradient_of(table), theirs


def gradient_of(table: Table) -> torch.Tensor:
    assert table.gradient is not None
    ids, rows = table.gradient
    return torch.zeros(table.num_rows, table.dim).index_add_(0, ids, rows)


IDS = torch.tensor([[1, 1, 4], [7, 9, 4], [0, 0, 0]])
FLAT, OFFSETS = torch.tensor([1, 1, 4, 7, 0, 9]), torch.tensor([0, 3, 3, 5])


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("padding", [None, 0, 4])
def test_embedding(padding: int | None, sparse: bool) -> None:
    ours, theirs = compared(nn.Embedding(20, 3, padding_idx=padding, sparse=sparse), IDS)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding", [None, 0])
def test_bags_of_one_size(mode: str, padding: int | None) -> None:
    ours, theirs = compared(nn.EmbeddingBag(20, 3, mode=mode, padding_idx=padding), IDS)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_by_offsets_of_which_some_are_empty(mode: str) -> None:
    ours, theirs = compared(nn.EmbeddingBag(20, 3, mode=mode, padding_idx=0), FLAT, OFFSETS)
    torch.testing.assert_close(ours, theirs)
    last = torch.cat([OFFSETS, torch.tensor([len(FLAT)])])
    ours, theirs = compared(nn.EmbeddingBag(20, 3, mode=mode, include_last_offset=True), FLAT, last)
    torch.testing.assert_close(ours, theirs)


def test_bags_with_weights() -> None:
    weights = torch.linspace(-1, 1, IDS.numel()).view_as(IDS)
    ours, theirs = compared(nn.EmbeddingBag(20, 3, mode="sum"), IDS, per_sample_weights=weights)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("layer", [nn.Embedding(20, 3), nn.EmbeddingBag(20, 3, mode="mean")])
def test_no_ids_at_all(layer: nn.Module) -> None:
    model = nn.Sequential(layer)
    want = layer(torch.zeros(0, 2, dtype=torch.int64))
    place_table(model, "0")
    assert model(torch.zeros(0, 2, dtype=torch.int64)).shape == want.shape


def test_only_empty_bags() -> None:
    model = nn.Sequential(nn.EmbeddingBag(20, 3))
    place_table(model, "0")
    assert model[0](torch.zeros(0, dtype=torch.int64), torch.tensor([0, 0])).tolist() == [[0.0] * 3] * 2


def test_a_layer_under_two_names_is_one_table() -> None:
    model = nn.ModuleDict({"user": nn.Embedding(5, 2)})
    model["other"] = model["user"]
    place_table(model, "user")
    assert model["user"] is model["other"]
    assert len(table_layers(model)) == 1


def test_the_stand_in_has_no_parameters_and_goes_as_it_came() -> None:
    model = nn.Sequential(nn.Embedding(5, 2), nn.Linear(2, 1))
    original = model[0]
    before = model[0].weight.detach().clone()
    layer = place_table(model, "0")
    assert [n for n, _ in model.named_parameters()] == ["1.weight", "1.bias"]
    with pytest.raises(ModelError, match=r"the model reads 0\.weight"):
        _ = layer.weight
    put_back(model, layer, before + 1)
    assert model[0] is original
    torch.testing.assert_close(model[0].weight.detach(), before + 1)


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        (torch.tensor([[1, 2], [3, 20]]), "the table 0 has no row 20, which sample 1"),
        (torch.tensor([[1, 2], [-1, 3], [0, 0]]), "the table 0 has no row -1, which sample 1"),
        (torch.tensor([1.0, 2.0]), "the table 0 was given ids of float32"),
        (torch.tensor([True]), "the table 0 was given ids of bool"),
    ],
)
def test_ids_that_no_table_has(ids: torch.Tensor, said: str) -> None:
    model = nn.Sequential(nn.Embedding(20, 3))
    place_table(model, "0")
    with pytest.raises(DataError, match=said):
        model(ids)


def test_a_bag_is_named_by_its_number() -> None:
    model = nn.Sequential(nn.EmbeddingBag(20, 3))
    place_table(model, "0")
    with pytest.raises(DataError, match="no row 30, which sample 2"):
        model[0](torch.tensor([1, 2, 3, 30]), torch.tensor([0, 1, 3]))


def test_what_cannot_be_placed() -> None:
    model = nn.ModuleDict(
        {"emb": nn.Embedding(5, 2), "norm": nn.Embedding(5, 2, max_norm=1.0), "head": nn.Linear(2, 5)}
    )
    with pytest.raises(UnknownNameError, match="one of: emb, norm"):
        place_table(model, "embedding")
    with pytest.raises(ModelError, match="head is a Linear and no table"):
        place_table(model, "head")
    with pytest.raises(ModelError, match="max_norm"):
        place_table(model, "norm")
    model["head"].weight = model["emb"].weight
    with pytest.raises(ModelError, match=r"shares its weight with head\.weight"):
        place_table(model, "emb")
    with pytest.raises(ModelError, match="float16"):
        place_table(nn.Sequential(nn.Embedding(5, 2, dtype=torch.float16)), "0")


def test_gradients_outside_of_a_step_are_dropped() -> None:
    model = nn.Sequential(nn.Embedding(20, 3))
    table = place_table(model, "0").table
    model(IDS).sum().backward()
    table.sum_up()
    assert table.gradient is not None and len(table.gradient[0]) == 0


def test_rows_with_one_id_add_up() -> None:
    ids, rows = summed(
        [(torch.tensor([1, 3]), torch.ones(2, 1)), (torch.tensor([3]), torch.ones(1, 1))], 1, torch.float32
    )
    assert ids.tolist() == [1, 3]
    assert rows.tolist() == [[1.0], [2.0]]
