"""One table: the part of its rows that this device holds, and what a step reads and adds up of it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from evener.errors import DataError, ModelError
from evener.runtime.tables.exchange import Route, RowExchange
from evener.runtime.tables.lookup import sorted_ids
from evener.runtime.tables.optimizers import TableOptimizer
from evener.runtime.tables.rows import WEIGHT, MemoryRows, Rows, add
from evener.runtime.tables.transfers import Outgoing

_AT_ONCE = 65_536  # rows that are brought up to date together


class Rates:
    """The learning rates of all steps so far; its length is the number of steps."""

    def __init__(self) -> None:
        self._all, self._used = np.zeros(64), 0

    def add(self, rate: float) -> None:
        """Count a step."""
        self.after(rate)
        self._used += 1

    def after(self, rate: float) -> np.ndarray:
        """All rates, were the next step's `rate`; good until the next call."""
        if self._used == len(self._all):
            self._all = np.concatenate([self._all, np.zeros(self._used)])
        self._all[self._used] = rate
        return self._all[: self._used + 1]

    def restore(self, rates: np.ndarray) -> None:
        """Count from the step on that these lead to."""
        self._all, self._used = np.concatenate([rates, np.zeros(64)]), len(rates)

    @property
    def values(self) -> np.ndarray:
        """One number a step."""
        return self._all[: self._used]


@dataclass(frozen=True)
class Part:
    """Rows `start` to `stop` of a table, the rest is elsewhere; in `rows` they are counted from 0."""

    start: int
    stop: int
    rows: Rows


@dataclass
class _Fetched:
    ids: torch.Tensor
    rows: torch.Tensor
    route: Route


@dataclass(frozen=True)
class _Given:
    """The gradient of one lookup, perhaps still on its way; rows in `dropped` do not count."""

    ids: torch.Tensor
    gradient: torch.Tensor | Outgoing
    dropped: torch.Tensor | None
    scale: float

    def arrived(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self.gradient.wait() if isinstance(self.gradient, Outgoing) else self.gradient
        ids, rows = self.ids, rows.to("cpu", dtype)
        if self.dropped is not None and bool(self.dropped.any()):
            ids, rows = ids[~self.dropped], rows[~self.dropped]
        return ids, rows if self.scale == 1.0 else rows * self.scale


class Table:
    """A table of `num_rows` rows of `dim` numbers, owner i of the group holding bounds[i] to bounds[i+1].

    By itself a device reads its rows as they are asked for. In a group `fetch` brings those of a whole step
    first, as devices run different numbers of micro-batches and must meet all the same.
    """

    def __init__(self, name: str, num_rows: int, dim: int, part: Part) -> None:
        self.name, self.num_rows, self.dim, self.part = name, num_rows, dim, part
        self.bounds: tuple[int, ...] = (0, num_rows)
        self.exchange: RowExchange | None = None
        self.optimizer: TableOptimizer | None = None
        self.rates = Rates()
        self.before: list[Part] = []  # what this device had before it shared anew, good until the next step
        self.ids_of: Callable[[Any], torch.Tensor] | None = None  # of a batch, once that is known
        self.is_whole = True  # whether all rows of `part` are there
        self.collects = False
        self.gradient: tuple[torch.Tensor, torch.Tensor] | None = None  # local ids, summed rows
        self._scale = 1.0
        self._pending: list[_Given] = []
        self._fetched: _Fetched | None = None
        self._untouched = True
        self.ids_asked = self.rows_asked = 0  # by lookups so far; a lookup's rows count once each

    @property
    def dtype(self) -> torch.dtype:
        return self.part.rows.columns[WEIGHT].dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of weight and optimiser state that this device holds in memory."""
        return sum(c.nbytes for c in self.part.rows.columns.values())

    def use(self, optimizer: TableOptimizer) -> None:
        """The rows move by `optimizer` from now on; its state starts from nothing, or as a file has it."""
        self.optimizer = optimizer
        self.part.rows.prepare(optimizer.widths(self.dim))
        self.rates.restore(self.part.rows.rates)

    def share(self, part: Part, bounds: tuple[int, ...], exchange: RowExchange) -> None:
        """From now on this device has `part`, and the others theirs."""
        self.part, self.bounds = part, bounds
        self.exchange = exchange if exchange.world_size > 1 else None

    def share_anew(self, part: Part, bounds: tuple[int, ...], exchange: RowExchange) -> None:
        """As `share`, with rows that are still to come; those that are here stay until the next step."""
        if self.optimizer is not None and self.is_whole:
            self.catch_up()
            self.before.append(self.part)
        if isinstance(part.rows, MemoryRows):
            part.rows.rates = np.zeros(len(self.rates.values))
        self.share(part, bounds, exchange)
        self.is_whole = False

    def catch_up(self) -> None:
        """All rows of this device are as of the last step."""
        assert self.optimizer is not None
        rows, count = self.part.rows, self.part.stop - self.part.start
        for first in range(0, count, _AT_ONCE):
            some = torch.arange(first, min(count, first + _AT_ONCE))
            self.optimizer.catch_up(rows, rows.slots(some), self.rates.values)

    @property
    def held(self) -> list[Part]:
        """Rows that this device could give to others as of now, once they are caught up."""
        taken = [self.part] if self.optimizer is not None and self.is_whole else []
        return [p for p in (*taken, *self.before) if p.start < p.stop]

    def own(self, ids: torch.Tensor, *, looked_up: bool = False) -> torch.Tensor:
        """Rows of this device's part as they are now, in the host's memory; `ids` count from its start.

        Those `looked_up` for a forward are counted.
        """
        rows = self.part.rows
        if len(ids) > rows.most:
            return torch.cat([self.own(piece, looked_up=looked_up) for piece in ids.split(rows.most)])
        slots = rows.slots(ids, looked_up=looked_up)
        if self.optimizer is not None:
            self.optimizer.catch_up(rows, slots, self.rates.values)
        return rows.columns[WEIGHT].index_select(0, slots).cpu()

    def read(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows of `ids` (sorted, each once). ModelError where the step was not told of them."""
        self.rows_asked += len(ids)
        if self.exchange is None:
            return self.own(ids, looked_up=True)
        fetched = self._fetched
        where = torch.searchsorted(fetched.ids, ids) if fetched is not None else None
        if fetched is not None and where is not None:
            where.clamp_(max=max(len(fetched.ids) - 1, 0))
            if not len(ids) or (len(fetched.ids) and bool((fetched.ids[where] == ids).all())):
                return fetched.rows.index_select(0, where)
        raise ModelError(
            f"the table {self.name} is asked for rows that are not among the ids found in the batch",
            numbers=f"rows asked for: {len(ids)}, fetched: {0 if fetched is None else len(fetched.ids)}",
            remedy=f'ids={{"{self.name}": lambda batch: the ids, as a tensor}} in the recipe',
        )

    def fetched(self, ids: torch.Tensor, rows: torch.Tensor, route: Route) -> None:
        """These are the rows of this step; `ids` sorted, each once."""
        self._fetched = _Fetched(ids, rows, route)

    def begin(self, scale: float) -> None:
        """Gradients count from now on, `scale` times each."""
        self.collects, self._scale = True, scale

    def collect(
        self, ids: torch.Tensor, gradient: torch.Tensor | Outgoing, dropped: torch.Tensor | None = None
    ) -> None:
        """Take in the gradient rows of one lookup but those `dropped`; none counts outside of a step."""
        if self.collects and self._scale != 0:
            self._pending.append(_Given(ids, gradient, dropped, self._scale))

    def sum_up(self) -> None:
        """Add up what all micro-batches and all devices gave; each owner then has its rows' gradient.

        Called by all devices of the group together.
        """
        ids, rows = summed([given.arrived(self.dtype) for given in self._pending], self.dim, self.dtype)
        self._pending = []
        self._untouched = not len(ids)
        if self.exchange is not None:
            assert self._fetched is not None, "a step fetches before it sums"
            route = self._fetched.route
            out = rows.new_zeros(len(self._fetched.ids), self.dim + 1)
            where = torch.searchsorted(self._fetched.ids, ids)
            out[where, : self.dim] = rows
            out[where, self.dim] = 1.0
            came = self.exchange.gradients_on(route, out)
            there = came[:, self.dim] > 0
            ids, rows = summed([(route.ids_asked[there], came[there, : self.dim])], self.dim, self.dtype)
            self._untouched = not route.anybody
        self.gradient = (ids - self.part.start, rows)

    def move(self, rate: float) -> None:
        """Let the optimiser take the step."""
        assert self.optimizer is not None
        if self._untouched or self.gradient is None:
            return  # no lookup anywhere: as a parameter whose gradient is None
        self.rates.add(rate)
        self.before.clear()
        rows = self.part.rows
        for ids, gradient in zip(*(x.split(rows.most) for x in self.gradient), strict=True):
            if len(ids):
                slots = rows.slots(ids)
                gradient = gradient.to(rows.columns[WEIGHT].device)
                self.optimizer.move(rows, slots, gradient, self.rates.values)
                rows.changed(slots)
        rows.stepped(self.rates.values)

    def discard(self) -> None:
        """Forget what was added up since the last step."""
        self._pending, self.gradient, self.collects = [], None, False


def summed(
    pieces: list[tuple[torch.Tensor, torch.Tensor]], dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows with the same id added up; ids come out sorted. Example: 3 and 1, then 3: rows of 1 and of 3."""
    if not pieces:
        return torch.zeros(0, dtype=torch.int64), torch.zeros(0, dim, dtype=dtype)
    if len(pieces) == 1 and _rises(pieces[0][0]):
        return pieces[0]
    ids = torch.cat([i for i, _ in pieces])
    rows = torch.cat([r for _, r in pieces])
    found = sorted_ids(ids)
    total = rows.new_zeros(len(found.unique), dim)
    add(total, found.places, rows)
    return found.unique, total


def _rises(ids: torch.Tensor) -> bool:
    return bool((ids[1:] > ids[:-1]).all())


def check_ids(ids: torch.Tensor, table: str, num_rows: int, offsets: torch.Tensor | None = None) -> None:
    """DataError that names table, value and sample unless all ids are whole numbers from 0 to num_rows - 1.

    `offsets` are where the bags of a flat list of ids begin: the sample is then the bag.
    """
    if ids.dtype not in (torch.int64, torch.int32):
        raise DataError(
            f"the table {table} was given ids of {str(ids.dtype).removeprefix('torch.')}",
            remedy="int64 or int32: ids.long(), after a look at why they are not",
        )
    if not ids.numel():
        return
    low, high = torch.aminmax(ids)
    if int(low) >= 0 and int(high) < num_rows:
        return
    wrong = ((ids < 0) | (ids >= num_rows)).nonzero()[0]
    sample = int(wrong[0])
    if offsets is not None:
        sample = int(torch.searchsorted(offsets, torch.tensor(sample), right=True)) - 1
    raise DataError(
        f"the table {table} has no row {int(ids[tuple(wrong)])}, which sample {sample} of a micro-batch "
        "asks for",
        numbers=f"rows 0 to {num_rows - 1}",
        remedy="look at that sample, or a larger table",
    )
