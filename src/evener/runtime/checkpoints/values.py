"""Tensors in a checkpoint that several devices own: each writes its values, who reads gets them whole.

    values/model/head.weight/10x4/0-21                  the first 21 values, of one device
    values/model/head.weight/10x4/21-40                 the rest, of another
    values/optimizer/head.weight/exp_avg/10x4/0-21      what the optimiser keeps for each

Together they are the tensors `model/head.weight` and `optimizer/head.weight/exp_avg` of 10 x 4.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor

from evener.errors import StateError

_PIECE = re.compile(r"values/(.+)/(\d{1,18}(?:x\d{1,18})*)/(\d{1,18})-(\d{1,18})")
Pieces = dict[str, list[tuple[int, int, str]]]


def piece_name(whole: str, shape: Iterable[int], start: int, stop: int) -> str:
    """The name of the values `start` to `stop` of the tensor `whole`, laid end to end."""
    return f"values/{whole}/{'x'.join(map(str, shape))}/{start}-{stop}"


def pieces_of(names: Iterable[str]) -> Pieces:
    """By tensor, its pieces as (first value, end, name), in order.

    Example: values/model/w/10/0-3 gives {"model/w": [(0, 3, "values/model/w/10/0-3")]}.
    """
    found: Pieces = {}
    for name in names:
        match = _PIECE.fullmatch(name)
        if match:
            found.setdefault(match[1], []).append((int(match[3]), int(match[4]), name))
    return {whole: sorted(pieces) for whole, pieces in found.items()}


def joined(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The same tensors (values with `shape` and `dtype`) with those in pieces as one each.

    StateError where pieces leave out values, have them twice, or are of unlike shapes or dtypes.
    """
    pieces = pieces_of(tensors)
    within = {name for held in pieces.values() for *_, name in held}
    result = {name: info for name, info in tensors.items() if name not in within}
    for whole, held in pieces.items():
        shapes = {_shape(name) for *_, name in held}
        infos = [tensors[name] for *_, name in held]
        edges = [0, *(stop for _, stop, _ in held)]
        follow = [(start, stop) for start, stop, _ in held] == list(itertools.pairwise(edges))
        sizes = all(tensors[name].shape == (stop - start,) for start, stop, name in held)
        (shape, *others) = shapes
        alike = not others and len({info.dtype for info in infos}) == 1 and whole not in result
        if not (follow and sizes and alike and edges[-1] == math.prod(shape)):
            raise StateError(
                f"the pieces of {whole} in this checkpoint are not those of one tensor",
                numbers=", ".join(name.removeprefix(f"values/{whole}/") for *_, name in held[:8]),
            )
        result[whole] = replace(infos[0], shape=shape)
    return result


def from_pieces(held: list[tuple[int, int, str]], read: Callable[[str], Tensor]) -> Tensor:
    """The tensor whose pieces are `held`."""
    return torch.cat([read(name) for *_, name in held]).view(_shape(held[0][2]))


def _shape(name: str) -> tuple[int, ...]:
    match = _PIECE.fullmatch(name)
    assert match is not None
    return tuple(int(n) for n in match[2].split("x"))
