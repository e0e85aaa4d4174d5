"""Where the parameters of a device's stages live, for those who sum their gradients and step on them."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from evener.runtime.residing.ondisk import StateOnDisk
from evener.runtime.residing.residing import Residing
from evener.runtime.residing.returning import Accept

OnHost = Callable[[Callable[[], Any]], Any]


class Homes:
    """All `Residing` of a device; without any, every parameter is its own leaf and lives where it lies.

    `on_host(work)` does work of the host's CPU, see `core.seams.Driver`; `state` has what of the optimiser's
    state lies on disk.
    """

    def __init__(
        self,
        residing: Sequence[Residing] = (),
        on_host: OnHost = lambda work: work(),
        state: StateOnDisk | None = None,
    ) -> None:
        self._residing, self.state = tuple(residing), state
        self._accepts: dict[int, Accept] = {}
        self.on_host: OnHost = on_host if self._residing else lambda work: work()
        for one in self._residing:
            one.returning.on_host = on_host
            one.returning.accept = lambda leaf, gradient: self._accepts[id(leaf)](leaf, gradient)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """`optimizer.step()`, where parameters and state live."""
        self.on_host(partial(self.state.step, optimizer) if self.state else optimizer.step)

    def leaves_of(self, p: nn.Parameter) -> list[nn.Parameter]:
        """What stands for `p` in graphs: its guests of each stage, else itself."""
        return [one.guest_of(p) for one in self._of(p)] or [p]

    def summed_on(self, p: nn.Parameter) -> torch.device:
        """Where gradients of `p` are added up."""
        return next((one.device for one in self._of(p) if one.stay), p.device)

    def route(self, leaf: nn.Parameter, accept: Accept) -> None:
        """Gradients of `leaf` that come by way of the host go to `accept`."""
        self._accepts[id(leaf)] = accept

    def takes(self, leaf: torch.Tensor, gradient: torch.Tensor) -> bool:
        """Whether `gradient` of `leaf` goes by way of the host; it has begun to, then."""
        one = next((x for x in self._residing if not x.stay and x.returning.knows(leaf)), None)
        if one is not None:
            one.returning.take(leaf, gradient)
        return one is not None

    def _of(self, p: nn.Parameter) -> list[Residing]:
        return [one for one in self._residing if one.has(p)]
