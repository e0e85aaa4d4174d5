"""Rows of the micro-batch after this one, on their way while the device computes; gradients on their way out.

    host     F0 queued │ rows of 1 looked up, sent  │ B0 …          │ F1 queued │ rows of 2 …
    device   ▓▓▓▓▓ F0 ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓ B0 ▓▓▓▓▓▓▓▓▓▓▓▓▓ F1 ▓▓▓▓▓▓▓▓▓
    lane in                ▒▒ rows of 1 ▒▒                              ▒▒ rows of 2 ▒▒
    lane out                                                    ▒▒ gradient of 0 ▒▒

What a device reads first in a step is sent during the step before it, as the rows will be if that step does
not touch them. Those that it does touch are sent again when they have moved, and all of them where the step
is skipped or takes another rate. Memory that a lane's copy goes to is not used by anything else meanwhile:
every action of a step ends with the device's own stream at rest.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from evener.errors import ModelError
from evener.runtime.tables.layer import TableLayer
from evener.runtime.tables.lookup import sorted_ids
from evener.runtime.tables.optimizers import defers
from evener.runtime.tables.rows import WEIGHT, SomeRows, put
from evener.runtime.tables.table import Table
from evener.runtime.tables.transfers import Lanes, Outgoing

IdsOf = Callable[[Any], Tensor]


@dataclass
class Foreseen:
    """Rows as after a step with the rate `rate`, number `steps` of all, that touches none of them."""

    columns: dict[str, Tensor]
    steps: int
    rate: float


class Sent:
    """The rows of one table for one micro-batch on the device: what a stand-in looks up in."""

    def __init__(self, layer: TableLayer, asked_for: Tensor, lanes: Lanes) -> None:
        self.layer, self._asked_for, self._lanes = layer, asked_for.long(), lanes
        self.ids = sorted_ids(asked_for).unique
        self.foreseen: Foreseen | None = None
        self.rows = self.device_ids = torch.zeros(0)
        self.unused: Tensor | None = None  # places of rows that the model did not ask for after all
        self._asked: list[Outgoing] = []

    def now(self, rate: float | None) -> Tensor:
        """The rows as they are; with a `rate`, as a step with it that does not touch them leaves them."""
        table = self.layer.table
        if rate is None:
            return table.read(self.ids)
        self.foreseen = foresee(table, self.ids, rate)
        return self.foreseen.columns[WEIGHT]

    def places(self, input: Tensor) -> Tensor:
        """Where the rows of `input` are, on the device; `check` looks later whether these are the ones."""
        self.layer.table.ids_asked += input.numel()
        self._asked.append(self._lanes.outgoing(input))
        found = torch.searchsorted(self.device_ids, input.long().contiguous())
        return found.clamp_(max=len(self.ids) - 1)

    def check(self) -> None:
        """ModelError if the model asked for other rows than it was sent."""
        asked, self._asked = [a.wait().reshape(-1).long() for a in self._asked], []
        if not asked or (len(asked) == 1 and torch.equal(asked[0], self._asked_for)):
            return
        every = torch.cat(asked)
        where = torch.searchsorted(self.ids, every).clamp_(max=len(self.ids) - 1)
        wrong = (self.ids[where] != every).nonzero()
        if len(wrong):
            name = self.layer.table.name
            raise ModelError(
                f"the table {name} is asked for rows that are not among the ids found in the batch",
                numbers=f"row {int(every[wrong[0]])}; {len(wrong)} of {len(every)} ids",
                remedy=f'ids={{"{name}": None}} in the recipe: its rows are then looked up when it is asked',
            )
        unused = torch.ones(len(self.ids), dtype=torch.bool)
        unused[where] = False
        self.unused = unused if bool(unused.any()) else None


@dataclass
class _Coming:
    """What was sent for a batch; `event` happens when all of it is there."""

    batch: Any
    sent: list[Sent]
    event: Any


class Lookahead:
    """Sends the rows of the micro-batch that comes after the one under way; for tables in the host's memory.

    `expect` says which it is, `arrive` and `look` are called before a forward and when it is queued, `depart`
    when a step's backwards are done, `settle` when tables have moved. `rate_of(table)` is the learning rate
    of the step under way. What it is not told of, or cannot send ahead, is looked up when the model asks.
    """

    def __init__(
        self,
        layers: Sequence[TableLayer],
        ids_of: Mapping[str, IdsOf],
        lanes: Lanes,
        rate_of: Callable[[Table], float],
    ) -> None:
        self._layers = [x for x in layers if x.table.name in ids_of and _on_host(x.table)]
        self._ids_of, self._rate_of = ids_of, rate_of
        self._lanes = lanes
        self._following: Any = None
        self._beyond = False
        self._coming: _Coming | None = None
        self._unchecked: list[Sent] = []
        for layer in layers:
            layer.lanes = self._lanes

    @property
    def tables(self) -> tuple[str, ...]:
        """Names of those whose rows are sent ahead."""
        return tuple(x.table.name for x in self._layers)

    def expect(self, following: Any, *, beyond: bool) -> None:
        """`following` is what comes after the next forward (None: nothing); `beyond`: in the next step."""
        self._following, self._beyond = following, beyond

    def arrive(self, batch: Any) -> None:
        """The rows of `batch` (None: of a stage without one) are there for its forward, if they were sent."""
        self._check()
        if batch is None:
            return
        coming, self._coming = self._coming, None
        if coming is None or coming.batch is not batch:
            return
        self._send_again(coming)
        coming.event.synchronize()
        for sent in coming.sent:
            sent.layer.sent = sent
            self._unchecked.append(sent)

    def look(self) -> None:
        """Send what is expected; the forward under way has been queued."""
        for layer in self._layers:
            layer.sent = None
        following, self._following = self._following, None
        if following is None:
            return
        found = [self._found(layer, following) for layer in self._layers]
        sent = [x for x in found if x is not None]
        rows = [x.now(self._rate_of(x.layer.table) if self._beyond else None) for x in sent]
        there = iter(self._lanes.sent([t for x, r in zip(sent, rows, strict=True) for t in (r, x.ids)]))
        for x in sent:
            x.rows, x.device_ids = next(there), next(there)
        self._coming = _Coming(following, sent, self._lanes.inwards.record_event())

    def depart(self) -> None:
        """Gradients have arrived in the host's memory."""
        self._check()
        self._lanes.outwards.synchronize()

    def settle(self) -> None:
        """The tables have moved by a step: send again what it touched."""
        coming = self._coming
        if coming is None:
            return
        patches = []
        for sent in coming.sent:
            if sent.foreseen is not None and _came_true(sent.foreseen, sent.layer.table):
                places = _settle(sent, sent.foreseen)
                sent.foreseen = None
                if len(places):
                    patches.append((sent.rows, places, sent.layer.table.own(sent.ids[places])))
        there = iter(self._lanes.sent([t for _, places, rows in patches for t in (places, rows)]))
        with self._lanes.inwards:
            for rows, _, _ in patches:
                rows.index_copy_(0, next(there), next(there))
        coming.event = self._lanes.inwards.record_event()

    def forget(self) -> None:
        """Nothing that was sent counts any more."""
        self._coming = self._following = None
        self._unchecked = []
        for layer in self._layers:
            layer.sent = None

    def _send_again(self, coming: _Coming) -> None:
        """Rows as they are, where they are not as foreseen: the step was skipped, or took another rate."""
        wrong = [x for x in coming.sent if x.foreseen is not None]
        there = self._lanes.sent([x.layer.table.own(x.ids) for x in wrong])
        for sent, rows in zip(wrong, there, strict=True):
            sent.rows, sent.foreseen = rows, None
        if wrong:
            coming.event = self._lanes.inwards.record_event()

    def _check(self) -> None:
        unchecked, self._unchecked = self._unchecked, []
        for sent in unchecked:
            sent.check()

    def _found(self, layer: TableLayer, batch: Any) -> Sent | None:
        asked_for = self._ids_of[layer.table.name](batch).reshape(-1)
        if not _can_be_sent(asked_for, layer.table):
            return None  # the lookup itself says what is wrong with them
        sent = Sent(layer, asked_for, self._lanes)
        return sent if len(sent.ids) <= layer.table.part.rows.most else None


def _on_host(table: Table) -> bool:
    return table.part.rows.columns[WEIGHT].device.type == "cpu"


def _can_be_sent(ids: Tensor, table: Table) -> bool:
    if ids.dtype not in (torch.int64, torch.int32) or not ids.numel():
        return False
    low, high = torch.aminmax(ids)
    return int(low) >= 0 and int(high) < table.num_rows


def foresee(table: Table, ids: Tensor, rate: float) -> Foreseen:
    """The rows of `ids` (sorted, each once) after a step with the rate `rate` that leaves them out."""
    rows, optimizer = table.part.rows, table.optimizer
    slots = rows.slots(ids, looked_up=True)
    table.rows_asked += len(ids)
    rates = table.rates.after(rate)
    if optimizer is None or not defers(optimizer, table.dim):
        weight = rows.columns[WEIGHT].index_select(0, slots)
        return Foreseen({WEIGHT: weight}, len(rates), rate)
    some = SomeRows({name: column.index_select(0, slots) for name, column in rows.columns.items()})
    optimizer.catch_up(some, torch.arange(len(ids)), rates)  # type: ignore[arg-type]
    return Foreseen(some.columns, len(rates), rate)


def _came_true(foreseen: Foreseen, table: Table) -> bool:
    rates = table.rates.values
    return len(rates) == foreseen.steps and float(rates[-1]) == foreseen.rate


def _settle(sent: Sent, foreseen: Foreseen) -> Tensor:
    """Keep what came as foreseen, as if it had been read now; the places of the others among the ids."""
    table = sent.layer.table
    assert table.gradient is not None and table.optimizer is not None
    touched = torch.isin(sent.ids, table.gradient[0], assume_unique=True)
    if defers(table.optimizer, table.dim):
        rest = (~touched).nonzero()[:, 0]
        slots = table.part.rows.slots(sent.ids[rest])
        for name, column in table.part.rows.columns.items():
            put(column, slots, foreseen.columns[name].index_select(0, rest))
        table.part.rows.changed(slots)
    return touched.nonzero()[:, 0]
