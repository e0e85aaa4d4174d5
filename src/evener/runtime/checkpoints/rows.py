"""Rows of tables in a checkpoint: each owner writes its part, who reads takes the rows that it wants.

    rows/model/emb.weight/0-31                 rows 0 to 30, of one device
    rows/model/emb.weight/31-50                the rest, of another
    rows/optimizer/emb.weight/exp_avg/0-31     state by row, under the names of torch's optimiser

Together they are the tensors `model/emb.weight` and `optimizer/emb.weight/exp_avg`, which a plain model has.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor

from evener.errors import StateError

_PART = re.compile(r"rows/(.+)/(\d{1,18})-(\d{1,18})")
Parts = dict[str, list[tuple[int, int, str]]]
Read = Callable[[str, int, int], Tensor]
"""(name, first, end) → rows first to end of the tensor `name`."""


def part_name(whole: str, start: int, stop: int) -> str:
    """The name of rows `start` to `stop` of the tensor `whole`."""
    return f"rows/{whole}/{start}-{stop}"


def parts_of(names: Mapping[str, Any]) -> Parts:
    """By tensor, its parts as (first row, end, name), in order.

    Example: rows/model/e.weight/0-3 gives {"model/e.weight": [(0, 3, "rows/model/e.weight/0-3")]}.
    """
    found: Parts = {}
    for name in names:
        match = _PART.fullmatch(name)
        if match:
            found.setdefault(match[1], []).append((int(match[2]), int(match[3]), name))
    return {whole: sorted(parts) for whole, parts in found.items()}


def wholes(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The same tensors (values with a `shape`) with those in parts as one each.

    StateError where parts leave out rows, have them twice or are of unlike shapes.
    """
    parts = parts_of(tensors)
    within = {name for held in parts.values() for *_, name in held}
    result = {name: info for name, info in tensors.items() if name not in within}
    for whole, held in parts.items():
        first = tensors[held[0][2]]
        end = 0
        for start, stop, name in held:
            info = tensors[name]
            fits = info.shape[:1] == (stop - start,) and info.shape[1:] == first.shape[1:]
            if start != end or not fits or info.dtype != first.dtype or whole in result:
                raise StateError(
                    f"the rows of {whole} in this checkpoint are not those of one table",
                    numbers=f"rows {start} to {stop} are {info} behind row {end}",
                )
            end = stop
        result[whole] = replace(first, shape=(end, *first.shape[1:]))
    return result


def rows_from(tensors: Mapping[str, Any], whole: str, start: int, stop: int, read: Read) -> Tensor:
    """Rows `start` to `stop` of the tensor `whole`, from whatever parts hold them.

    Example: rows 2 to 5 of parts 0-3 and 3-9 are row 2 of the first and rows 0 and 1 of the second.
    """
    held = parts_of({n: i for n, i in tensors.items() if n.startswith(f"rows/{whole}/")}).get(whole)
    if held is None:
        return read(whole, start, stop)
    pieces = [
        read(name, max(start, first) - first, min(stop, end) - first)
        for first, end, name in held
        if first < stop and start < end
    ]
    if len(pieces) == 1:
        return pieces[0]
    return torch.cat(pieces) if pieces else read(held[0][2], 0, 0)
