"""Optimisers of tables: they move the rows that a step touched, and know what the others missed.

    meaning     rows without a gradient in a step
    "touched"   stay as they are, state and weight decay included: what torch's sparse optimisers do
    "dense"     move as under torch's dense optimiser; that is made up for when a row is next read

Gradients come summed and divided, each row once. `rates` are the learning rates of all steps so far.
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, Protocol

import numpy as np
import torch

from evener.errors import ModelError, UsageError
from evener.runtime.tables.idle import IdleSteps
from evener.runtime.tables.rows import WEIGHT, Rows, add, put

Meaning = Literal["touched", "dense"]
SEEN = "seen"  # the last step that a row has in it
_AGES = (1, 64, 1024, 2**62)  # bounds of `seen`; rows that no step touched are in none: m = v = 0


class TableOptimizer(Protocol):
    """How the rows of a table move. `lr` None: the rate of the job's own optimiser, schedule included."""

    @property
    def lr(self) -> float | None: ...

    def widths(self, dim: int) -> dict[str, int]:
        """Numbers of state for a row of `dim` numbers, by column."""
        ...

    def move(self, rows: Rows, slots: torch.Tensor, gradient: torch.Tensor, rates: np.ndarray) -> None:
        """Take step number `len(rates)` with `gradient` for the rows in `slots`, which is used up."""
        ...

    def catch_up(self, rows: Rows, slots: torch.Tensor, rates: np.ndarray) -> None:
        """Give the rows in `slots` what they missed until now, so that they can be read."""
        ...


def defers(optimizer: TableOptimizer, dim: int) -> bool:
    """Whether rows that a step leaves out move all the same, which is made up for when they are next read."""
    return SEEN in optimizer.widths(dim)


def _check(optimizer: Any) -> None:
    for name, low in (("lr", 0.0), ("weight_decay", 0.0), ("eps", 0.0)):
        value = getattr(optimizer, name, None)
        if value is not None and not low <= value < math.inf:
            raise UsageError(f"{name} of a table's {type(optimizer).__name__} is {value}")
    if getattr(optimizer, "meaning", "dense") not in ("touched", "dense"):
        raise UsageError(f"meaning={optimizer.meaning!r}", remedy='meaning="touched" or "dense"')


@dataclass(frozen=True, kw_only=True)
class TableSGD:
    """p -= lr · (g + weight_decay · p). With "dense" decay goes on in rows that a step does not touch.

    Example: p = 1, g = 0.5, lr = 0.1: 0.95.
    """

    lr: float | None = None
    weight_decay: float = 0.0
    meaning: Meaning = "dense"

    def __post_init__(self) -> None:
        _check(self)

    def widths(self, dim: int) -> dict[str, int]:
        return {SEEN: 1} if self._defers else {}

    def move(self, rows: Rows, slots: torch.Tensor, gradient: torch.Tensor, rates: np.ndarray) -> None:
        weight, lr = rows.columns[WEIGHT], float(rates[-1])
        if self.weight_decay:
            gradient = gradient.add(weight.index_select(0, slots), alpha=self.weight_decay)
        add(weight, slots, gradient.mul_(-lr))
        if self._defers:
            rows.columns[SEEN].index_fill_(0, slots, float(len(rates)))

    def catch_up(self, rows: Rows, slots: torch.Tensor, rates: np.ndarray) -> None:
        late = _late(rows, slots, rates) if self._defers else None
        if late is None:
            return
        slots, seen = late
        kept = IdleSteps(0.0, 0.0, self.weight_decay).kept(seen, rates)
        weight = rows.columns[WEIGHT]
        put(weight, slots, weight.index_select(0, slots) * _column(kept, weight))
        rows.columns[SEEN].index_fill_(0, slots, float(len(rates)))
        rows.changed(slots)

    @property
    def _defers(self) -> bool:
        return self.meaning == "dense" and self.weight_decay > 0


@dataclass(frozen=True, kw_only=True)
class TableAdagrad:
    """s += g²; p -= lr · g / (√s + eps). `row_wise`: one s a row, the mean of g² over it.

    A row without a gradient does not move, so both meanings are one; weight decay counts in touched rows.
    """

    lr: float | None = None
    eps: float = 1e-10
    weight_decay: float = 0.0
    initial: float = 0.0
    lr_decay: float = 0.0
    row_wise: bool = False

    def __post_init__(self) -> None:
        _check(self)

    def widths(self, dim: int) -> dict[str, int]:
        return {"sum": 1 if self.row_wise else dim}

    def move(self, rows: Rows, slots: torch.Tensor, gradient: torch.Tensor, rates: np.ndarray) -> None:
        weight, sums = rows.columns[WEIGHT], rows.columns["sum"]
        lr = float(rates[-1]) / (1 + (len(rates) - 1) * self.lr_decay)
        if self.weight_decay:
            gradient = gradient.add(weight.index_select(0, slots), alpha=self.weight_decay)
        square = gradient.square()
        square = square.mean(1, keepdim=True) if self.row_wise else square
        total = square.add_(sums.index_select(0, slots))
        put(sums, slots, total)
        scale = total.add(self.initial).sqrt_().add_(self.eps)
        add(weight, slots, (gradient / scale).mul_(-lr))

    def catch_up(self, rows: Rows, slots: torch.Tensor, rates: np.ndarray) -> None:
        return


@dataclass(frozen=True, kw_only=True)
class TableAdam:
    """Adam as torch.optim.Adam ("dense") or torch.optim.SparseAdam ("touched") would move the rows.

    `decoupled` decays weights apart from the gradient, as AdamW. Steps that a row missed are made up for at
    once (see `idle.py`), under "dense" with decay in the gradient one by one.
    """

    lr: float | None = None
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = False
    meaning: Meaning = "dense"

    def __post_init__(self) -> None:
        _check(self)
        if not all(0 <= b < 1 for b in self.betas):
            raise UsageError(f"betas of a table's Adam are {self.betas}", remedy="two numbers in [0, 1)")

    def widths(self, dim: int) -> dict[str, int]:
        state = {"mean": dim, "square": dim}
        return state | {SEEN: 1} if self.meaning == "dense" else state

    def move(self, rows: Rows, slots: torch.Tensor, gradient: torch.Tensor, rates: np.ndarray) -> None:
        columns, step, lr = rows.columns, len(rates), float(rates[-1])
        p = columns[WEIGHT].index_select(0, slots)
        m, v = (columns[n].index_select(0, slots) for n in ("mean", "square"))
        self._step(p, m, v, gradient, step, lr)
        for name, value in ((WEIGHT, p), ("mean", m), ("square", v)):
            put(columns[name], slots, value)
        if self.meaning == "dense":
            columns[SEEN].index_fill_(0, slots, float(step))

    def _step(
        self, p: torch.Tensor, m: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None, step: int, lr: float
    ) -> None:
        """One step in place; g None stands for a gradient of zero."""
        beta1, beta2 = self.betas
        if self.weight_decay and self.decoupled:
            p.mul_(1 - lr * self.weight_decay)
        elif self.weight_decay:
            g = p * self.weight_decay if g is None else g.add(p, alpha=self.weight_decay)
        if g is None:
            m.mul_(beta1)
            v.mul_(beta2)
        else:
            m.lerp_(g, 1 - beta1)
            v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        bc1, bc2 = 1 - beta1**step, 1 - beta2**step
        if self.meaning == "dense":
            p.addcdiv_(m, (v.sqrt() / math.sqrt(bc2)).add_(self.eps), value=-lr / bc1)
        else:  # SparseAdam adds eps before the correction
            p.addcdiv_(m, v.sqrt().add_(self.eps), value=-lr * math.sqrt(bc2) / bc1)

    def catch_up(self, rows: Rows, slots: torch.Tensor, rates: np.ndarray) -> None:
        late = _late(rows, slots, rates) if self.meaning == "dense" else None
        if late is None:
            return
        slots, seen = late
        columns = rows.columns
        p, m, v = (columns[n].index_select(0, slots) for n in (WEIGHT, "mean", "square"))
        decay = self.weight_decay if self.decoupled else 0.0
        idle = IdleSteps(*self.betas, decay, 1e-13 if p.dtype == torch.float64 else 1e-9)
        if not idle.leaps or (self.weight_decay and not self.decoupled):
            self._loop(p, m, v, seen, rates)
        else:
            self._leap(p, m, v, seen, rates, idle)
        for name, value in ((WEIGHT, p), ("mean", m), ("square", v)):
            put(columns[name], slots, value)
        columns[SEEN].index_fill_(0, slots, float(len(rates)))
        rows.changed(slots)

    def _loop(
        self, p: torch.Tensor, m: torch.Tensor, v: torch.Tensor, seen: np.ndarray, rates: np.ndarray
    ) -> None:
        order = np.argsort(seen, kind="stable")
        for step in range(int(seen.min()) + 1, len(rates) + 1):
            here = torch.from_numpy(order[: np.searchsorted(seen[order], step)]).to(p.device)
            some = p[here], m[here], v[here]
            self._step(*some, None, step, float(rates[step - 1]))
            for whole, part in zip((p, m, v), some, strict=True):
                whole[here] = part

    def _leap(
        self,
        p: torch.Tensor,
        m: torch.Tensor,
        v: torch.Tensor,
        seen: np.ndarray,
        rates: np.ndarray,
        idle: IdleSteps,
    ) -> None:
        beta1, beta2 = self.betas
        p.mul_(_column(idle.kept(seen, rates), p))
        order, now = np.argsort(seen, kind="stable"), len(rates)
        ends = np.searchsorted(seen[order], _AGES)
        for start, end in pairwise(ends):  # rows of one age share their stretches
            if start == end:
                continue
            here = order[start:end]  # the longer a row was left out, the earlier it comes
            those = torch.from_numpy(here).to(p.device)
            distinct, which = np.unique(seen[here], return_inverse=True)
            by_row = torch.from_numpy(which.reshape(-1)).to(p.device)
            some, mean = v.index_select(0, those), m.index_select(0, those)
            a = (some / _column(1 - beta2**distinct, p)[by_row]).sqrt_()
            total = torch.zeros_like(a)
            for stretch in idle.of(distinct, rates):
                late = int(np.searchsorted(seen[here], now - stretch.first, side="right"))
                root, rows = a[:late], by_row[:late]
                inverse = (root * _column(stretch.middle, p)[rows]).add_(self.eps).reciprocal_()
                moments = torch.from_numpy(stretch.moments).to(p.device, p.dtype)[:, rows, None]
                x, sum_ = (root * inverse).neg_(), moments[-1].expand_as(root)
                for moment in reversed(moments[:-1]):
                    sum_ = torch.addcmul(moment, sum_, x)
                total[:late].addcmul_(sum_, inverse)
            add(p, those, total.mul_(mean).neg_())
            gap = len(rates) - distinct
            put(m, those, mean.mul_(_column(beta1**gap, p)[by_row]))
            put(v, those, some.mul_(_column(beta2**gap, p)[by_row]))


def _late(rows: Rows, slots: torch.Tensor, rates: np.ndarray) -> tuple[torch.Tensor, np.ndarray] | None:
    """Slots of the rows that missed steps, and the last step of each; None where there are none."""
    seen = rows.columns[SEEN].index_select(0, slots)[:, 0]
    late = (seen < len(rates)).nonzero()[:, 0]
    if not len(late):
        return None
    return slots[late], seen[late].cpu().numpy().astype(np.int64)


def _column(values: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(values).to(like.device, like.dtype)[:, None]


def like_torch(optimizer: torch.optim.Optimizer, table: str) -> TableOptimizer:
    """The table's optimiser that does what `optimizer` would do to the whole table; its lr is left open.

    ModelError for one that tables do not have (momentum, amsgrad, other algorithms).
    """
    kind, given = type(optimizer), optimizer.defaults
    odd = [n for n in ("momentum", "amsgrad", "maximize", "nesterov") if given.get(n)]
    made: TableOptimizer | None = None
    if not odd and kind is torch.optim.SGD:
        made = TableSGD(weight_decay=given["weight_decay"])
    elif not odd and kind is torch.optim.Adagrad and not given["weight_decay"]:
        made = TableAdagrad(
            eps=given["eps"], lr_decay=given["lr_decay"], initial=given["initial_accumulator_value"]
        )
    elif not odd and kind in (torch.optim.Adam, torch.optim.AdamW):
        made = TableAdam(
            betas=given["betas"],
            eps=given["eps"],
            weight_decay=given["weight_decay"],
            decoupled=kind is torch.optim.AdamW or bool(given.get("decoupled_weight_decay")),
        )
    elif not odd and kind is torch.optim.SparseAdam:
        made = TableAdam(betas=given["betas"], eps=given["eps"], meaning="touched")
    if made is None:
        with_odd = f" with {', '.join(odd)}" if odd else ""
        raise ModelError(
            f"the table {table} cannot be moved as {kind.__name__}{with_odd} would",
            remedy="table_optimizer=ev.TableAdam(...), TableSGD(...) or TableAdagrad(...) in the recipe",
        )
    return made
