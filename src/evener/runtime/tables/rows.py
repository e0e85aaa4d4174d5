"""Where a table's rows lie, with their optimiser's state: columns of one length, found by slot."""

import ctypes
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from evener.errors import ModelError

STAND_IN_ROWS = 65_536  # of a table that is not made yet, while the rest of the model is measured
INIT_BLOCK = 4096  # rows drawn from one generator: any part of a table can be made by itself
WEIGHT = "weight"
_LARGE_PAGE = 2 * 2**20
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25  # of Linux; the second for memory that is in use already
_FLOATS = (torch.float32, torch.float64)


class Rows(Protocol):
    """Rows of a table by number; `columns` are matrices in which a row lies at its slot."""

    @property
    def columns(self) -> dict[str, torch.Tensor]: ...

    @property
    def most(self) -> int:
        """Rows that can be in their slots at the same time."""
        ...

    def prepare(self, widths: Mapping[str, int]) -> None:
        """Add a column of zeros for each name and width (numbers a row)."""
        ...

    def slots(self, ids: torch.Tensor, *, looked_up: bool = False) -> torch.Tensor:
        """Slots of the rows `ids` (int64 on the CPU, each once), which now hold them.

        Only those `looked_up` for a forward are counted in `found_in`.
        """
        ...

    @property
    def found_in(self) -> dict[str, int]:
        """Rows looked up so far by the memory that had them; empty where there is only one."""
        ...

    def changed(self, slots: torch.Tensor) -> None:
        """The rows in `slots` were written to."""
        ...

    @property
    def rates(self) -> np.ndarray:
        """Learning rates of the steps that the rows have behind them from before this process."""
        ...

    def stepped(self, rates: np.ndarray) -> None:
        """A step has moved all rows that it moves; `rates` are the learning rates of all steps so far."""
        ...

    def commit(self) -> None:
        """What outlives this process is as of the last step."""
        ...

    def refill(self, pieces: Iterable[tuple[int, Mapping[str, torch.Tensor]]], step: int) -> None:
        """All rows anew, as of `step`: each piece has the first row's number and values of all columns."""
        ...


def put(matrix: torch.Tensor, slots: torch.Tensor, values: torch.Tensor) -> None:
    """matrix[slots] = values; numpy's way takes half the time of torch's on the CPU."""
    if matrix.device.type == "cpu":
        matrix.numpy()[slots.numpy()] = values.numpy()
    else:
        matrix.index_copy_(0, slots, values)


def add(matrix: torch.Tensor, slots: torch.Tensor, values: torch.Tensor) -> None:
    """matrix[slots] += values, also where slots repeat: an eighth of the time of index_add_ on the CPU."""
    matrix.scatter_add_(0, slots[:, None].expand(-1, matrix.shape[1]), values)


def in_large_pages(tensor: torch.Tensor) -> torch.Tensor:
    """Ask the system to keep `tensor` in pages of 2 MiB, so that rows at random take fewer look-ups of pages.

    Advice alone: where it is not taken, everything goes on as it is.
    """
    if tensor.device.type == "cpu" and tensor.nbytes >= 2 * _LARGE_PAGE and sys.platform == "linux":
        start = -(-tensor.data_ptr() // _LARGE_PAGE) * _LARGE_PAGE
        size = (tensor.data_ptr() + tensor.nbytes - start) // _LARGE_PAGE * _LARGE_PAGE
        system = ctypes.CDLL(None)
        for advice in (_MADV_HUGEPAGE, _MADV_COLLAPSE):
            system.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), advice)
    return tensor


def side_by_side(matrix: torch.Tensor, widths: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """Columns of these widths out of `matrix`: what belongs to a row is in one place and fetched at once.

    Example: Adam on 1,500 of 2 million rows of 64 takes 1.10 ms, 1.23 ms with a matrix for each column.
    """
    return dict(zip(widths, matrix.split(list(widths.values()), 1), strict=True))


class MemoryRows:
    """All rows in one memory: a slot is the row's number. The weight is the tensor given, not a copy."""

    def __init__(self, weight: torch.Tensor) -> None:
        check_dtype(weight.dtype)
        self.columns = {WEIGHT: in_large_pages(weight)}
        self.rates = np.zeros(0)
        self.most = max(len(weight), 1)
        self.found_in: dict[str, int] = {}

    def prepare(self, widths: Mapping[str, int]) -> None:
        weight = self.columns[WEIGHT]
        state = in_large_pages(weight.new_zeros(len(weight), sum(widths.values())))
        self.columns |= side_by_side(state, widths)

    def slots(self, ids: torch.Tensor, *, looked_up: bool = False) -> torch.Tensor:
        return ids.to(self.columns[WEIGHT].device)

    def changed(self, slots: torch.Tensor) -> None:
        return

    def stepped(self, rates: np.ndarray) -> None:
        return

    def commit(self) -> None:
        return

    def refill(self, pieces: Iterable[tuple[int, Mapping[str, torch.Tensor]]], step: int) -> None:
        for first, columns in pieces:
            for name, values in columns.items():
                self.columns[name][first : first + len(values)].copy_(values)


@dataclass
class SomeRows:
    """Copies of a few rows, to try something on."""

    columns: dict[str, torch.Tensor]

    def changed(self, slots: torch.Tensor) -> None:
        return


class StandInRows(MemoryRows):
    """Zeros that cost what a table costs: several rows share one, until the table itself is made."""

    def __init__(self, num_rows: int, dim: int, dtype: torch.dtype) -> None:
        super().__init__(torch.zeros(min(num_rows, STAND_IN_ROWS), dim, dtype=dtype))

    def slots(self, ids: torch.Tensor, *, looked_up: bool = False) -> torch.Tensor:
        return ids % len(self.columns[WEIGHT])


def check_dtype(dtype: torch.dtype) -> None:
    """ModelError unless a table can have `dtype`: sums over many steps need float32 or more."""
    if dtype not in _FLOATS:
        raise ModelError(f"a table of {dtype} cannot be placed", remedy="float32 or float64")


def initial_rows(
    start: int, stop: int, dim: int, seed: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Rows `start` to `stop` of a new table, standard normal, the same whoever makes them.

    Block number b of 4,096 rows is drawn from a generator seeded with (seed, b).
    Example: rows 5 to 9 of a table are rows 0 to 4 of what `initial_rows(5, 10, …)` gives.
    """
    made = torch.empty(stop - start, dim, dtype=dtype)
    for block in range(start // INIT_BLOCK, -(-stop // INIT_BLOCK)):
        generator = torch.Generator().manual_seed((seed * 1_000_003 + block) % 2**63)
        drawn = torch.empty(INIT_BLOCK, dim).normal_(generator=generator)
        first = block * INIT_BLOCK
        low, high = max(start, first), min(stop, first + INIT_BLOCK)
        made[low - start : high - start] = drawn[low - first : high - first]
    return made
