"""Which part of a batch holds the ids that a table is asked for, found by running the model once.

The stand-ins note what they are asked for. Candidates are the batch's tensors and, where they have two
dimensions or more, their columns: the first that holds the same values is taken. What it is, is said in a
sentence; a batch in which nothing matches needs the user's own word.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_leaves_with_path

from evener.errors import ModelError
from evener.runtime.tables.layer import TableLayer

IdsOf = Callable[[Any], Tensor]


def ids_asked(
    model: nn.Module, layers: Sequence[TableLayer], run: Callable[[], Any]
) -> dict[str, list[Tensor]]:
    """By table, the ids of every lookup while `run()` runs the model in evaluation mode."""
    asked: dict[str, list[Tensor]] = {x.table.name: [] for x in layers}

    def note(layer: TableLayer, ids: Tensor) -> None:
        asked[layer.table.name].append(ids.detach().cpu())

    modes = [(m, m.training) for m in model.modules()]
    model.eval()
    for layer in layers:
        layer.watcher = note
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            run()
    finally:
        for layer in layers:
            layer.watcher = None
        for module, mode in modes:
            module.training = mode
    return asked


def find_ids(batch: Any, asked: Sequence[Tensor], table: str) -> tuple[IdsOf, str]:
    """(batch → ids, a sentence) for a table that was asked for `asked` when the model ran on `batch`.

    ModelError where no part of the batch holds them. Example: for `emb(x[:, 1])` of a batch (x, y) the
    function takes column 1 of x, and the sentence ends in "batch[0][:, 1]".
    """
    found: list[tuple[Callable[[list[Tensor]], Tensor], str]] = []
    for ids in asked:
        matches = [(take, name) for take, name, held in _candidates(batch, ids) if _same(held, ids)]
        if not matches:
            raise ModelError(
                f"no part of a batch holds the ids that the table {table} is asked for",
                numbers=f"ids of shape {tuple(ids.shape)}",
                remedy=f'ids={{"{table}": lambda batch: the ids, as a tensor}} in the recipe',
            )
        if matches[0][1] not in [name for _, name in found]:
            found.append(matches[0])
    takes = [take for take, _ in found]

    def ids_of(batch: Any) -> Tensor:
        leaves = [leaf for _, leaf in tree_leaves_with_path(batch)]
        return torch.cat([take(leaves).reshape(-1) for take in takes]) if takes else torch.zeros(0).long()

    return ids_of, f"table {table}: its ids are {', '.join(name for _, name in found) or 'never asked for'}"


def _candidates(batch: Any, ids: Tensor) -> Iterator[tuple[Callable[[list[Tensor]], Tensor], str, Tensor]]:
    """(how to take it from the batch's leaves, its name, its values): whole tensors first, then columns."""
    leaves = list(tree_leaves_with_path(batch))
    tensors = [(i, f"batch{keystr(p)}", t) for i, (p, t) in enumerate(leaves) if isinstance(t, Tensor)]
    for i, name, tensor in tensors:
        yield _take(i), name, tensor
    for i, name, tensor in tensors:
        column = tensor.numel() // tensor.shape[1] if tensor.dim() > 1 and tensor.numel() else 0
        width = ids.numel() // column if column else 0
        for first in range(tensor.shape[1] - width + 1 if width else 0):
            columns = slice(first, first + width)
            label = f"{first}" if width == 1 else f"{first}:{first + width}"
            yield _take(i, columns), f"{name}[:, {label}]", tensor[:, columns]


def _take(number: int, columns: slice | None = None) -> Callable[[list[Tensor]], Tensor]:
    return lambda leaves: leaves[number] if columns is None else leaves[number][:, columns]


def _same(held: Tensor, ids: Tensor) -> bool:
    """Whether `held` has the values of `ids`, in whatever shape and dtype."""
    return held.numel() == ids.numel() and bool((held.reshape(-1) == ids.reshape(-1)).all())
