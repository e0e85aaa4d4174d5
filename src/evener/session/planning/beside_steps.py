"""What a run on an accelerator does beside its actions, for the measurement of whole steps.

ROWS    rows of tables in host memory are sent before they are asked for, and their gradients come back
READ    the host reads the loss, and the gradients' norm where there is a largest one; each bucket gets a few
        numbers from the host and gives them back
"""

from typing import Any

import torch

from evener.core.buckets import fill_buckets
from evener.runtime.tables.ahead import Lookahead
from evener.runtime.tables.layer import table_layers
from evener.runtime.tables.transfers import Lanes
from evener.session.layout.tables import ids_found
from evener.session.recipe import Recipe


class BesideSteps:
    """See `profiling.steps.Beside`: the model of `recipe` on `device`, one step after another.

    Example: where a copy takes 10 ms at the least, as over a scaled link, a step with one bucket is 30 ms
    longer.
    """

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        self._parameters = [p for p in recipe.model.parameters() if p.requires_grad]
        self._has_norm = recipe.max_norm is not None
        self._lookahead: Lookahead | None = None
        sizes = [p.nbytes for p in self._parameters]
        self._tails = [torch.zeros(len(bucket)) for bucket in fill_buckets(sizes)]
        self._layers = table_layers(recipe.model)
        if self._layers:
            ids_of, _ = ids_found(recipe, self._layers, must=False)
            self._lookahead = Lookahead(self._layers, ids_of, Lanes(device), lambda table: 0.0)

    def arrive(self, batch: Any) -> None:
        """The rows of `batch` are there, sent while nothing was timed."""
        if self._lookahead:
            for table in (x.table for x in self._layers):
                table.begin(1.0)  # gradients are collected, and dropped when they have arrived
            self.look(batch)
            self._lookahead.arrive(batch)

    def look(self, batch: Any) -> None:
        """Rows like those of `batch` leave for the device."""
        if self._lookahead:
            self._lookahead.expect(batch, beyond=False)
            self._lookahead.look()

    def depart(self) -> None:
        """The gradients of the step's rows are in host memory."""
        if self._lookahead:
            self._lookahead.depart()
            self._lookahead.forget()
            for table in (x.table for x in self._layers):
                table.discard()

    def read(self, loss: torch.Tensor) -> None:
        """The loss, what comes with each bucket of gradients, and the norm of all."""
        loss.reshape(1).tolist()
        for tail in self._tails:
            tail.to(loss.device).tolist()
        norms = [p.grad.norm() for p in self._parameters if p.grad is not None] if self._has_norm else []
        if norms:
            torch.stack(norms).norm().item()
