"""Lookups whose gradient is summed by rows in the host's memory: both ways are bags of rows.

    ids      4 1 4 9        sorted   1 | 4 4 | 9     order 1 | 0 2 | 3       starts 0 1 3
    forward  bag b is the sum of the rows of its ids
    backward row r is the sum of the gradients of the bags that its ids were in: again sums over `starts`

torch's own backward adds up id by id, which takes several times as long; both give the same sums.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


@dataclass(frozen=True)
class Ids:
    """A flat list of ids: its distinct ones in order, each id's place among them, and the ids sorted.

    `order` are positions in the list by id, `starts` where each distinct id begins in it.
    """

    unique: Tensor
    places: Tensor
    order: Tensor
    starts: Tensor


def sorted_ids(ids: Tensor) -> Ids:
    """The above of whole numbers on the CPU. Example: 4 1 4 9 as in the picture; places 1 0 1 2."""
    flat = ids.reshape(-1).numpy()
    if not len(flat):
        nothing = torch.zeros(0, dtype=torch.int64)
        return Ids(nothing, nothing, nothing, nothing)
    small = flat.astype(np.int32) if flat.max() < 2**31 else flat  # sorts in half the time
    order = np.argsort(small)
    in_order = flat[order]
    new = np.empty(len(flat), dtype=bool)
    new[0] = True
    np.not_equal(in_order[1:], in_order[:-1], out=new[1:])
    places = np.empty(len(flat), dtype=np.int64)
    places[order] = np.cumsum(new) - 1
    starts = np.flatnonzero(new)
    unique = in_order[starts].astype(np.int64, copy=False)
    return Ids(*(torch.from_numpy(x) for x in (unique, places, order, starts)))


@dataclass(frozen=True)
class Bags:
    """The bag of each id, where each bag begins, and a factor for each id (None: 1)."""

    bag: Tensor
    offsets: Tensor
    factors: Tensor | None


def bags_of(
    ids: Tensor, offsets: Tensor | None, mode: str, factors: Tensor | None, padding: int | None, *, last: bool
) -> tuple[Tensor, Bags]:
    """The ids that count, flat, and their bags, of EmbeddingBag's arguments; `last`: offsets have an end."""
    if offsets is None:
        num, each = ids.shape
        counts = torch.full((num,), each)
    else:
        ends = offsets if last else torch.cat([offsets, torch.tensor([ids.numel()])])
        counts = ends.diff()
        num = len(counts)
    flat, bag = ids.reshape(-1), torch.repeat_interleave(torch.arange(num), counts)
    factors = None if factors is None else factors.reshape(-1)
    if padding is not None:
        keep = flat != padding
        flat, bag = flat[keep], bag[keep]
        factors = None if factors is None else factors[keep]
        counts = torch.bincount(bag, minlength=num)
    if mode == "mean":
        factors = counts.clamp(min=1).to(torch.float64).reciprocal()[bag]
    return flat, Bags(bag, counts.cumsum(0) - counts, factors)


def look_up(rows: Tensor, ids: Ids) -> Tensor:
    """The row of each id: (ids, dim)."""
    return _Rows.apply(rows, ids)


def sum_bags(rows: Tensor, ids: Ids, bags: Bags) -> Tensor:
    """Sums of rows times factors by bag: (bags, dim)."""
    if bags.factors is not None:
        bags = Bags(bags.bag, bags.offsets, bags.factors.to(rows.dtype))
    return _Sums.apply(rows, ids, bags)


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, ids: Ids) -> Tensor:
        ctx.ids = ids
        return rows.index_select(0, ids.places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradient: Tensor) -> tuple[Tensor, None]:
        (out,) = gradient
        return _sums(ctx.ids.order, out.contiguous(), ctx.ids.starts, None), None


class _Sums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, ids: Ids, bags: Bags) -> Tensor:
        ctx.ids, ctx.bags = ids, bags
        return _sums(ids.places, rows, bags.offsets, bags.factors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradient: Tensor) -> tuple[Tensor, None, None]:
        (out,) = gradient
        ids, bags = ctx.ids, ctx.bags
        factors = None if bags.factors is None else bags.factors[ids.order]
        return _sums(bags.bag[ids.order], out.contiguous(), ids.starts, factors), None, None


def _sums(which: Tensor, rows: Tensor, starts: Tensor, factors: Tensor | None) -> Tensor:
    if not len(starts) or not len(rows):
        return rows.new_zeros(len(starts), rows.shape[1])
    return F.embedding_bag(which, rows, starts, mode="sum", per_sample_weights=factors)
