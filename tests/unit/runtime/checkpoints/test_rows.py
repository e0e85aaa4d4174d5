"""Rows of a table are found in whatever parts they were written; parts that are no table are refused."""

import pytest
import torch

from evener.errors import StateError
from evener.runtime.checkpoints.manifest import TensorInfo
from evener.runtime.checkpoints.rows import part_name, parts_of, rows_from, wholes

NAME = "model/emb.weight"
TABLE = torch.arange(20.0).reshape(10, 2)


def written(*bounds: tuple[int, int]) -> dict[str, torch.Tensor]:
    return {part_name(NAME, a, b): TABLE[a:b] for a, b in bounds}


def infos(tensors: dict[str, torch.Tensor]) -> dict[str, TensorInfo]:
    return {n: TensorInfo(dtype="F32", shape=tuple(t.shape)) for n, t in tensors.items()}


@pytest.mark.parametrize("bounds", [((0, 10),), ((7, 10), (0, 3), (3, 7))], ids=["one part", "three"])
def test_any_rows_from_any_parts(bounds: tuple[tuple[int, int], ...]) -> None:
    held = written(*bounds)
    assert wholes(infos(held)) == {NAME: TensorInfo(dtype="F32", shape=(10, 2))}
    for start in range(11):
        for stop in range(start, 11):
            found = rows_from(held, NAME, start, stop, lambda name, a, b: held[name][a:b])
            assert torch.equal(found, TABLE[start:stop]), (start, stop)


def test_a_tensor_that_lies_whole_is_read_in_rows_as_well() -> None:
    whole = {NAME: TABLE}
    assert wholes(infos(whole)) == infos(whole)
    assert torch.equal(rows_from(whole, NAME, 2, 5, lambda n, a, b: whole[n][a:b]), TABLE[2:5])


@pytest.mark.parametrize(
    "bounds", [((0, 4), (5, 10)), ((0, 5), (4, 10)), ((1, 10),)], ids=["a gap", "an overlap", "no first row"]
)
def test_parts_that_make_up_no_table(bounds: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(StateError, match="are not those of one table"):
        wholes(infos(written(*bounds)))


def test_a_part_of_another_shape_or_beside_a_whole_one() -> None:
    for wrong in (
        infos(written((0, 5))) | {part_name(NAME, 5, 10): TensorInfo(dtype="F32", shape=(5, 3))},
        infos(written((0, 5))) | {part_name(NAME, 5, 10): TensorInfo(dtype="F64", shape=(5, 2))},
        infos(written((0, 5))) | {part_name(NAME, 5, 10): TensorInfo(dtype="F32", shape=(4, 2))},
        infos(written((0, 10))) | {NAME: TensorInfo(dtype="F32", shape=(10, 2))},
    ):
        with pytest.raises(StateError, match="are not those of one table"):
            wholes(wrong)


def test_names_that_are_no_part() -> None:
    assert parts_of(dict.fromkeys(["rows/a/1", "rows/a/x-2", "model/rows/1-2x", "rows//1-2"])) == {}
