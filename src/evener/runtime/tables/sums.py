"""Tables in the sums of a step: what `Reducers` asks of a group of gradients, answered for tables.

Their norm enters the one clip norm, their gradients are divided and clipped like all others, and they move
when the job's optimiser moves: a step that does not count leaves them as they were.
"""

from collections.abc import Callable, Sequence

import torch

from evener.runtime.tables.layer import TableLayer
from evener.runtime.tables.table import Table


class TableSums:
    """The tables of this device among its other gradients; each row is counted by the device that owns it."""

    def __init__(self, layers: Sequence[TableLayer]) -> None:
        self.tables: list[Table] = list({id(x.table): x.table for x in layers}.values())
        self._base_rate = 1.0
        self.moved: Callable[[], None] = lambda: None  # called when all tables have moved
        self._rate_of_job: Callable[[], float] = lambda: self._base_rate

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Move the tables whenever `optimizer` has moved, by its learning rate or in step with it."""
        self._base_rate = optimizer.param_groups[0]["lr"]
        self._rate_of_job = lambda: optimizer.param_groups[0]["lr"]
        optimizer.register_step_post_hook(lambda *_: self._move())

    def rate_of(self, table: Table) -> float:
        """The learning rate of `table` in the step under way."""
        rate = self._rate_of_job()
        own = table.optimizer.lr if table.optimizer else None
        scheduled = rate / self._base_rate if self._base_rate else 1.0
        return rate if own is None else own * scheduled

    def _move(self) -> None:
        for table in self.tables:
            table.move(self.rate_of(table))
        self.moved()

    def begin(self, scale: float) -> None:
        for table in self.tables:
            table.begin(scale)

    def take(self, p: torch.Tensor, grad: torch.Tensor) -> None:
        """`grad` is what a backward in two parts gave for a lookup's rows."""
        hand_in = getattr(p, "evener_hand_in", None)
        if hand_in is not None:
            hand_in(grad)

    def arm(self, step: int, segment: int = 0) -> None:
        """Nothing leaves before the step's last backward: a later lookup may add to any row."""

    def release(self, step: int, segment: int) -> None:
        """As `arm`."""

    def launch_rest(self, step: int) -> None:
        """As `arm`: `wait` exchanges."""

    def wait(self) -> None:
        """Gradients travel to the owners of their rows; called by all devices together."""
        for table in self.tables:
            table.sum_up()

    def finish(self, divide_by: float = 1.0) -> None:
        """Divide what was summed."""
        self.multiply(1.0 / divide_by)

    def multiply(self, factor: float | torch.Tensor) -> None:
        for table in self.tables:
            if table.gradient is not None and factor != 1.0:
                table.gradient[1].mul_(factor)

    def norm(self) -> torch.Tensor:
        """The 2-norm of the summed gradients of this device's rows."""
        norms = [t.gradient[1].norm().double() for t in self.tables if t.gradient is not None]
        return torch.stack(norms).norm() if norms else torch.zeros((), dtype=torch.float64)

    def discard(self) -> None:
        for table in self.tables:
            table.discard()

    def close(self) -> None:
        """Nothing to let go of: a step in flight may still be concluded, and its optimiser goes with it."""
