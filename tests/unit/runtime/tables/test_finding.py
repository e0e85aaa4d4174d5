"""Where a table's ids stand in a batch is found by running the model; what is not found is said."""

import pytest
import torch
from torch import nn

from evener.errors import ModelError
from evener.runtime.tables.finding import find_ids, ids_asked
from evener.runtime.tables.layer import place_table, table_layers


class Towers(nn.Module):
    """Two tables, a normalisation that must not learn from being watched, and ids in columns."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(50, 2), nn.EmbeddingBag(50, 2)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(torch.cat([self.user(x[:, 0]), self.item(x[:, 2:4])], 1))


BATCH = (torch.arange(40).reshape(8, 5), torch.zeros(8))


def test_columns_are_found_and_the_model_is_left_as_it_was() -> None:
    model = Towers()
    for name in ("user", "item"):
        place_table(model, name)
    before = model.norm.running_mean.clone()  # type: ignore[union-attr]
    asked = ids_asked(model, table_layers(model), lambda: model(BATCH[0]))
    user, said = find_ids(BATCH, asked["user"], "user")
    item, said_item = find_ids(BATCH, asked["item"], "item")
    assert said == "table user: its ids are batch[0][:, 0]"
    assert said_item == "table item: its ids are batch[0][:, 2:4]"
    other = (torch.arange(10).reshape(2, 5), torch.zeros(2))
    assert user(other).tolist() == [0, 5]
    assert item(other).tolist() == [2, 3, 7, 8]
    assert torch.equal(before, model.norm.running_mean)  # type: ignore[arg-type]
    assert model.training


def test_several_lookups_and_dictionaries() -> None:
    batch = {"a": torch.tensor([1, 2]), "b": torch.tensor([5, 6])}
    take, said = find_ids(batch, [batch["a"], batch["b"]], "emb")
    assert take(batch).tolist() == [1, 2, 5, 6]
    assert said == "table emb: its ids are batch['a'], batch['b']"


def test_ids_that_no_part_of_the_batch_holds() -> None:
    with pytest.raises(ModelError, match="no part of a batch holds the ids"):
        find_ids(BATCH, [BATCH[0][:, 0] + 100], "user")
