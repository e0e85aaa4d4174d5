"""Rows over several memories as one table: each level keeps what is asked for most of the level below.

    hot     rows on the device          slots ◄── ids asked for
    host    rows in the host's memory   ▲ │ evicted: the least used
    cold    a file with all rows        │ ▼ (changed ones are written down)

A row's use counts one for each step that asks for it, and a count halves in about `HALF_LIFE` steps: what was
popular once makes room for what is popular now.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from evener.errors import FileError, UsageError
from evener.runtime.tables.coldfile import ColdFile
from evener.runtime.tables.rows import WEIGHT, check_dtype, put, side_by_side

HALF_LIFE = 100
_EVICTED_PART = 16  # this part of a level makes room at once, as choosing costs a look at all slots
_MOST_LOGGED = 4  # times its cache, before the file is committed; the table, while a checkpoint reads it
RATES = "rates"  # file of the learning rates of all steps, beside the rows


class Below(Protocol):
    """Where a level gets rows from and writes changed ones to: whole records, state included."""

    def read(self, ids: np.ndarray) -> np.ndarray: ...

    def write(self, ids: np.ndarray, records: np.ndarray) -> None: ...

    def commit(self, step: int) -> None: ...


class Level:
    """`most` records of the table `below` on `device`, in columns of these `widths`."""

    def __init__(
        self,
        most: int,
        num_rows: int,
        widths: Mapping[str, int],
        below: Below,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.most, self.below = min(most, num_rows), below
        self._records = torch.zeros(self.most, sum(widths.values()), dtype=dtype, device=device)
        self.columns = side_by_side(self._records, widths)
        self._slot = np.full(num_rows, -1, dtype=np.int64)
        self._id = np.full(self.most, -1, dtype=np.int64)
        self._uses = np.zeros(self.most)
        self._dirty = np.zeros(self.most, dtype=bool)
        self._worth, self._growth = 1.0, 2.0 ** (1 / HALF_LIFE)
        self._free = self.most
        self.counts = False  # whether rows are asked for by a lookup, and not to be moved or written down
        self.asked = self.found = 0

    def slots(self, ids: np.ndarray) -> np.ndarray:
        """Slots of `ids` (each once, at most `most`), which now hold them."""
        slots = self._slot[ids]
        missing = np.flatnonzero(slots < 0)
        if self.counts:
            self.asked += len(ids)
            self.found += len(ids) - len(missing)
        if len(missing):
            fresh = self._room(len(missing), slots[slots >= 0])
            self._put(fresh, self.below.read(ids[missing]))
            self._id[fresh], self._slot[ids[missing]] = ids[missing], fresh
            self._dirty[fresh] = False
            self._uses[fresh] = 0.0
            slots[missing] = fresh
        self._uses[slots] += self._worth
        self._worth *= self._growth
        if self._worth > 1e100:
            self._uses /= self._worth
            self._worth = 1.0
        return slots

    def changed(self, slots: np.ndarray) -> None:
        """The records in `slots` are newer than those below."""
        self._dirty[slots] = True

    def read(self, ids: np.ndarray) -> np.ndarray:
        """Records of any number of rows, for the level above."""
        return np.concatenate([self._get(self.slots(part)) for part in parts_of(ids, self.most)])

    def write(self, ids: np.ndarray, records: np.ndarray) -> None:
        """Newer records of any number of rows, from the level above."""
        done, counts, self.counts = 0, self.counts, False
        for part in parts_of(ids, self.most):
            slots = self.slots(part)
            self._put(slots, records[done : done + len(part)])
            self.changed(slots)
            done += len(part)
        self.counts = counts

    def commit(self, step: int) -> None:
        """Everything is as it is here also below, as of `step`."""
        dirty = np.flatnonzero(self._dirty)
        if len(dirty):
            self.below.write(self._id[dirty], self._get(dirty))
            self._dirty[dirty] = False
        self.below.commit(step)

    def _room(self, count: int, busy: np.ndarray) -> np.ndarray:
        """`count` slots without a row; the least used make way, never those in `busy`."""
        if self._free < count:
            uses = np.where(self._id < 0, np.inf, self._uses)
            uses[busy] = np.inf
            most = self.most - self._free - len(busy)
            away = min(most, max(count - self._free, self.most // _EVICTED_PART))
            victims = np.argpartition(uses, away - 1)[:away]
            changed = victims[self._dirty[victims]]
            if len(changed):
                self.below.write(self._id[changed], self._get(changed))
            self._slot[self._id[victims]], self._id[victims] = -1, -1
            self._dirty[victims] = False
            self._free += away
        self._free -= count
        return np.flatnonzero(self._id < 0)[:count]

    def _get(self, slots: np.ndarray) -> np.ndarray:
        where = torch.from_numpy(slots).to(self._records.device)
        return self._records.index_select(0, where).cpu().numpy()

    def _put(self, slots: np.ndarray, records: np.ndarray) -> None:
        where, device = torch.from_numpy(slots), self._records.device
        put(self._records, where.to(device), torch.from_numpy(records).to(device))


def parts_of(ids: np.ndarray, most: int) -> list[np.ndarray]:
    """`ids` in pieces of at most `most`; one of no ids for none."""
    return [ids[i : i + most] for i in range(0, len(ids), most)] or [ids]


class TieredRows:
    """Rows of a table in a file, those in use in the host's memory, and of these some on a device.

    host, hot: rows kept in either memory; 0 hot leaves out the device. give(start, stop): a new table's rows.
    A folder that holds the table already is gone on with. UsageError for a cache of no rows.
    """

    def __init__(
        self,
        folder: Path,
        num_rows: int,
        give: Callable[[int, int], Tensor],
        *,
        host: int,
        hot: int = 0,
        device: torch.device | None = None,
    ) -> None:
        if host < 1 or hot < 0:
            raise UsageError(f"a tiered table with {host} rows in memory, {hot} hot", remedy="1 or more")
        self.folder, self.num_rows, self._give = folder, num_rows, give
        self._host, self._hot, self._device = host, hot, device or torch.device("cpu")
        sample = give(0, 0)
        check_dtype(sample.dtype)
        self._dtype, self._dim = sample.dtype, sample.shape[1]
        self.rates = np.zeros(0)
        self._levels: list[Level] = []

    def prepare(self, widths: Mapping[str, int]) -> None:
        """Make the file with room for state, or open it."""
        self.close()
        every = {WEIGHT: self._dim, **widths}
        # A folder for each layout: state of another optimiser would be read as this one's.
        name = "-".join(f"{n}{w}" for n, w in every.items())
        self.file = ColdFile(self.folder / name, self.num_rows, sum(every.values()), self._dtype)
        if self.file.step < 0:
            self._fill()
        self.rates = self._kept_rates()
        self._widths = every
        self._levels = self._empty_levels()

    @property
    def columns(self) -> dict[str, Tensor]:
        """Of the uppermost memory."""
        if not self._levels:
            self.prepare({})
        return self._levels[-1].columns

    @property
    def most(self) -> int:
        """Rows that can be in their slots at the same time."""
        return min(self._hot or self._host, self.num_rows)

    def slots(self, ids: Tensor, *, looked_up: bool = False) -> Tensor:
        device = self.columns[WEIGHT].device
        for level in self._levels:
            level.counts = looked_up
        return torch.from_numpy(self._levels[-1].slots(ids.numpy())).to(device)

    def changed(self, slots: Tensor) -> None:
        self._levels[-1].changed(slots.cpu().numpy())

    def stepped(self, rates: np.ndarray) -> None:
        """A step is done: from time to time the file is brought up to it."""
        self.rates = rates
        most = _MOST_LOGGED * self._host
        if self.file.reading.locked():  # a commit would wait until a whole checkpoint is written
            most = max(most, self.num_rows)
        if self.file.logged > most:
            self.commit()

    @property
    def log_bytes(self) -> int:
        """Room that the log may need: a run's end reads all rows, which writes down what they missed."""
        return (max(_MOST_LOGGED * self._host, self.num_rows) + 2 * self._host) * self.file.record_bytes

    def commit(self) -> None:
        """The file has all rows as of the last step, come what may.

        What a row missed is made up for with the learning rates since it was last used, so they stay with the
        rows: first they, then the rows, and of rates beyond the file's step nobody reads.
        """
        if self._levels and len(self.rates):
            self.file.keep(RATES, self.rates.astype("<f8").tobytes())
            self._levels[-1].commit(len(self.rates))

    def committed(self, first: int, stop: int) -> dict[str, Tensor]:
        """Columns of rows as the last commit left them; for another thread while it holds `file.reading`."""
        return side_by_side(torch.from_numpy(self.file.committed(first, stop)), self._widths)

    def refill(self, pieces: Iterable[tuple[int, Mapping[str, Tensor]]], step: int) -> None:
        """All rows anew. Killed in the middle, the folder is as one that was never filled."""
        self.file.begin_anew()
        for first, columns in pieces:
            self.file.fill(first, torch.cat([columns[n] for n in self._widths], 1).numpy())
        self.rates = np.zeros(step)
        self.file.keep(RATES, self.rates.tobytes())
        self.file.commit(step)
        self._levels = self._empty_levels()

    @property
    def found_in(self) -> dict[str, int]:
        """Rows looked up so far by the memory that had them: "hot" where there is one, "host" and "file"."""
        if not self._levels:
            return {}
        host, *above = self._levels
        found = {"host": host.found, "file": host.asked - host.found}
        return {"hot": above[0].found} | found if above else found

    def _kept_rates(self) -> np.ndarray:
        path, step = self.file.folder / RATES, self.file.step
        found = np.fromfile(path, "<f8") if path.exists() else np.zeros(0)
        if len(found) < step:
            raise FileError(
                f"{self.file.folder} does not have the learning rates of the steps that its rows made",
                numbers=f"{len(found)} of {step}",
                remedy="another folder, or remove this one",
            )
        return found[:step]

    def _empty_levels(self) -> list[Level]:
        levels = [self._level(self._host, self.file, torch.device("cpu"))]
        return [*levels, self._level(self._hot, levels[0], self._device)] if self._hot else levels

    def _level(self, most: int, below: Below, device: torch.device) -> Level:
        return Level(most, self.num_rows, self._widths, below, device, self._dtype)

    def _fill(self) -> None:
        step = max(1, 2**22 // self._dim)
        for first in range(0, self.num_rows, step):
            self.file.fill(first, self._give(first, min(self.num_rows, first + step)).numpy())
        self.file.commit(0)

    def close(self) -> None:
        """Let go of the file; what was not committed is dropped."""
        if self._levels:
            self.file.close()
            self._levels = []
