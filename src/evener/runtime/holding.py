"""What the steps of one device have in common: what it holds, how it reaches the others, and its samples."""

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import torch
from torch import nn

from evener.core.buckets import BUCKET_BYTES
from evener.core.routes import Piece
from evener.core.seams import Channel, Driver, Wire
from evener.core.trace import Cause, Span
from evener.runtime.outer.late import Late
from evener.runtime.owning.owned import Owned
from evener.runtime.parts import Part
from evener.runtime.problem import Problem
from evener.runtime.ranks import Ranks
from evener.runtime.reducers import Reducers, reducers_of_one_model
from evener.runtime.residing.homes import Homes, OnHost
from evener.runtime.residing.ondisk import StateOnDisk
from evener.runtime.residing.residing import Residing
from evener.runtime.scaling import LossScale
from evener.runtime.tables.ahead import Lookahead
from evener.runtime.tally import Tally
from evener.runtime.wires.grouped import GroupedWire

TRACED_ACTIONS = 4096  # the newest ones; older ones are in the records as seconds by cause


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How steps are taken: the part of a job's wishes that the executor needs.

    `ranges` opens a range of that name around each action: what a profiler shows.
    """

    max_norm: float | None = None
    on_non_finite: Literal["stop", "skip"] = "stop"
    loss_scale: float | None = None
    ranges: Callable[[str], AbstractContextManager[object]] = nullcontext


@dataclass(frozen=True, kw_only=True)
class Circle:
    """The group of this device where groups take steps by themselves: gradients and tally are its own.

    `wire` sums inside it; with `late` the other groups' gradients come one step later.
    """

    ranks: Ranks
    wire: Wire
    late: Late | None = None


@dataclass(frozen=True, kw_only=True)
class Holding:
    """What this device holds of the model, and how it reaches the others.

    `quick` sums the few numbers of a step where there is a faster way than `wire`; `circle` is who takes
    steps together where that is not everyone; `ahead` sends rows of tables before they are asked for.
    """

    parts: dict[int, Part]
    reducers: Reducers
    wire: Wire
    channel: Channel | None = None
    quick: Wire | None = None
    grouped: tuple[GroupedWire, ...] = ()  # wires of gradients that go over groups of devices
    circle: Circle | None = None
    homes: Homes = field(default_factory=Homes)
    owned: Owned | None = None  # this device's part of state that is held in parts
    ahead: Lookahead | None = None

    @property
    def loses(self) -> bool:
        """Whether any gradient goes between groups in fewer bits."""
        return any(wire.exchange.loses for wire in self.grouped)

    def settle(self, *, counts: bool, factor: float) -> None:
        """A step is over; see `GroupedWire.settle`."""
        for wire in self.grouped:
            wire.settle(counts=counts, factor=factor)

    def sums_between(self, since: float, until: float) -> list[tuple[str, float, float]]:
        """Name, begin and end of what sums took in that time, which has just passed.

        Over groups the part in which values were between them comes last.
        """
        seconds = [wire.between_s(until - since) for wire in self.grouped if wire.is_timed]
        if not seconds:
            return [("REDUCE_GRAD", since, until)]
        turn = until - min(max(seconds), until - since)
        return [("REDUCE_GRAD inside groups", since, turn), ("REDUCE_GRAD between groups", turn, until)]

    @property
    def link_rates(self) -> dict[str, float]:
        """Bytes/s that came from devices of other groups in the last step, by device, at their best."""
        found: dict[str, float] = {}
        for wire in self.grouped:
            found |= {d: max(rate, found.get(d, 0.0)) for d, rate in wire.rates.items()}
        return found

    def recompute(self, stages: Mapping[int, bool]) -> None:
        """From the next micro-batch on recompute in those stages that say so; parameters stay as they are."""
        for number, part in self.parts.items():
            self.parts[number] = replace(part, recompute=stages[number])


class Portions(Protocol):
    """Who takes which samples of each micro-batch; `core.routes.Routes` of the plan is one."""

    def num_backwards(self, stage: int, device: str) -> int:
        """Micro-batches of `stage` in which `device` has samples."""
        ...

    def samples(self, stage: int, device: str, micro_batch: int) -> int: ...

    def forward_pieces(self, stage: int, micro_batch: int) -> tuple[Piece, ...]: ...

    def backward_pieces(self, stage: int, micro_batch: int) -> tuple[Piece, ...]: ...


@dataclass(frozen=True)
class Alone:
    """The portions of a device that runs the whole model on micro-batches of `sizes` samples."""

    sizes: tuple[int, ...]

    def num_backwards(self, stage: int, device: str) -> int:
        return len([size for size in self.sizes if size])

    def samples(self, stage: int, device: str, micro_batch: int) -> int:
        return self.sizes[micro_batch] if micro_batch < len(self.sizes) else 0

    def forward_pieces(self, stage: int, micro_batch: int) -> tuple[Piece, ...]:
        return ()

    def backward_pieces(self, stage: int, micro_batch: int) -> tuple[Piece, ...]:
        return ()


class Routed:
    """Which pieces of each micro-batch this device gives and takes; kept while the portions are the same."""

    def __init__(self, here: str) -> None:
        self._here = here
        self._portions: Portions | None = None
        self._found: dict[tuple[str, str, tuple[int, int]], tuple[Piece, ...]] = {}

    def of(self, portions: Portions) -> "Routed":
        """The same for `portions`."""
        if portions is not self._portions:
            self._portions, self._found = portions, {}
        return self

    def all(self, direction: str, key: tuple[int, int]) -> tuple[Piece, ...]:
        """Everything that (stage, micro-batch) `key` hands over in direction "F" or "B"."""
        assert self._portions is not None
        p = self._portions
        return p.forward_pieces(*key) if direction == "F" else p.backward_pieces(*key)

    def given(self, direction: str, key: tuple[int, int]) -> tuple[Piece, ...]:
        """What of it comes from this device."""
        found = self._found.get(("given", direction, key))
        if found is None:
            found = tuple(p for p in self.all(direction, key) if p.source == self._here)
            self._found["given", direction, key] = found
        return found

    def taken(self, direction: str, key: tuple[int, int]) -> tuple[Piece, ...]:
        """What of it goes to this device."""
        found = self._found.get(("taken", direction, key))
        if found is None:
            found = tuple(p for p in self.all(direction, key) if p.target == self._here)
            self._found["taken", direction, key] = found
        return found


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What every step of a device works with."""

    holding: Holding
    optimizer: torch.optim.Optimizer
    problem: Problem
    ranks: Ranks
    driver: Driver
    settings: Settings
    tally: Tally
    loss_scale: LossScale | None
    routed: Routed
    traced: deque[tuple[str, float, float, Cause, int]] = field(
        default_factory=lambda: deque(maxlen=TRACED_ACTIONS)
    )

    @property
    def spans(self) -> tuple[Span, ...]:
        """What this device did last, action by action."""
        return tuple(
            Span(device=self.ranks.here, action=action, start_s=start, end_s=end, cause=cause, step=step)
            for action, start, end, cause, step in self.traced
        )


def whole_model(
    model: nn.Module,
    problem: Problem,
    ranks: Ranks,
    wire: Wire,
    *,
    sums: Wire | None = None,
    stage: int = 0,
    device: torch.device | None = None,
    autocast: torch.dtype | None = None,
    recompute: bool = False,
    residing: Residing | None = None,
    on_host: OnHost = lambda work: work(),
    state: StateOnDisk | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    circle: Circle | None = None,
) -> Holding:
    """The holding of data parallelism: the whole model as stage `stage`, its gradients summed over all.

    They go by `sums` where that is not the `wire` of the few numbers of a step, and stay inside `circle`.
    """
    part = Part(
        stage=stage,
        module=model,
        problem=problem,
        device=device or torch.device("cpu"),
        autocast=autocast,
        recompute=recompute,
        residing=residing,
    )
    homes = Homes([residing] if residing else [], on_host, state)
    among, by = (circle.ranks, circle.wire) if circle else (ranks, sums or wire)
    reducers = reducers_of_one_model(model, among, by, stage, bucket_bytes, homes)
    return Holding(parts={stage: part}, reducers=reducers, wire=wire, homes=homes, circle=circle)
