"""Tensors whose values several devices wrote."""

import pytest
import torch

from evener.errors import StateError
from evener.runtime.checkpoints.manifest import TensorInfo
from evener.runtime.checkpoints.values import from_pieces, joined, piece_name, pieces_of

WHOLE = "model/head.weight"


def infos(*edges: tuple[int, int], dtype: str = "F32") -> dict[str, TensorInfo]:
    return {piece_name(WHOLE, (10, 4), a, b): TensorInfo(dtype=dtype, shape=(b - a,)) for a, b in edges}


def test_pieces_are_one_tensor_of_the_shape_in_their_names():
    found = joined(infos((21, 40), (0, 21)) | {"model/b": TensorInfo(dtype="F32", shape=(3,))})
    assert found == {
        WHOLE: TensorInfo(dtype="F32", shape=(10, 4)),
        "model/b": TensorInfo(dtype="F32", shape=(3,)),
    }


def test_values_come_back_in_order_whoever_wrote_them_first():
    values = torch.arange(40.0)
    held = pieces_of(infos((21, 40), (0, 21)))[WHOLE]
    written = {name: values[a:b] for a, b, name in held}
    assert torch.equal(from_pieces(held, written.__getitem__), values.view(10, 4))


@pytest.mark.parametrize(
    "edges", [((0, 21),), ((0, 21), (22, 40)), ((0, 21), (20, 40)), ((0, 21), (21, 41)), ((5, 40),)]
)
def test_values_that_are_missing_or_there_twice_are_refused(edges: tuple):
    with pytest.raises(StateError, match="not those of one tensor"):
        joined(infos(*edges))


def test_pieces_of_unlike_dtypes_or_sizes_are_refused():
    with pytest.raises(StateError):
        joined(infos((0, 21)) | infos((21, 40), dtype="F64"))
    short = {piece_name(WHOLE, (10, 4), 0, 40): TensorInfo(dtype="F32", shape=(39,))}
    with pytest.raises(StateError):
        joined(short)
    with pytest.raises(StateError):
        joined(infos((0, 40)) | {WHOLE: TensorInfo(dtype="F32", shape=(10, 4))})
