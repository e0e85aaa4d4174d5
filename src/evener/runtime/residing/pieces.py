"""Parameters that come and go together: on the host the user's own, on the device their guests.

home (pinned, flat)  │ weight │ bias │ …     masters: the user's parameters, views of it
there (flat)         │ weight │ bias │ …     guests: leaves of the graph, views of it while it is there
"""

from collections.abc import Sequence

import torch
from torch import nn

from evener.runtime.residing.flow import Copied, Flow

_ALIGNED = 64  # values: a guest begins where the device reads whole lines


class Piece:
    """`masters` of one dtype that the same layers use, and that all train or are all frozen."""

    def __init__(self, masters: Sequence[nn.Parameter], flow: Flow) -> None:
        self.masters, self._flow = tuple(masters), flow
        self._places, numel = [], 0
        for p in self.masters:
            self._places.append(numel)
            numel += -(-p.numel() // _ALIGNED) * _ALIGNED
        dtype = self.masters[0].dtype
        self._home = flow.host(numel, dtype).zero_()
        for p, view in zip(self.masters, self.views_of(self._home), strict=True):
            view.copy_(p.detach())
            p.data = view
        # One value in the shape of each: a gradient may come while its guest is away, and takes its shape.
        nothing = torch.zeros(1, dtype=dtype, device=flow.device)
        self._away = [nothing.expand(p.shape) for p in self.masters]
        self.guests = tuple(
            nn.Parameter(away, requires_grad=p.requires_grad)
            for p, away in zip(self.masters, self._away, strict=True)
        )
        self.there: torch.Tensor | None = None
        self._coming: Copied | None = None
        self._version = -1

    @property
    def num_bytes(self) -> int:
        """What it takes on the device."""
        return self._home.nbytes

    @property
    def is_here(self) -> bool:
        """Whether the device has its present values, or they are on their way."""
        return self.there is not None and self._version == self._home_version()

    def bring(self) -> None:
        """Start its way to the device, unless its present values are there or on their way."""
        if self.is_here:
            return
        self._gather()
        fresh = self.there is None
        self._coming = self._flow.bring(self._home, self.there)
        self._version, self.there = self._home_version(), self._coming.tensor
        if fresh:
            for guest, view in zip(self.guests, self.views_of(self.there), strict=True):
                guest.data = view

    def await_(self) -> None:
        """What is queued on the device from now on finds it there."""
        coming, self._coming = self._coming, None
        if coming is not None:
            self._flow.await_(coming)

    def release(self) -> None:
        """Let go of the device's memory; graphs that need it again ask for it."""
        self.await_()  # else a copy that still comes would write over what gets this memory next
        self.there = None
        for guest, away in zip(self.guests, self._away, strict=True):
            guest.data = away

    def gradients(self) -> torch.Tensor:
        """Memory of the device for its gradients, with nothing in it yet."""
        return torch.empty_like(self._home, device=self._flow.device)

    def _home_version(self) -> int:
        return sum(p._version for p in self.masters)

    def _gather(self) -> None:
        """Masters whose memory somebody replaced (new weights, say) come back to the flat one."""
        for p, view in zip(self.masters, self.views_of(self._home), strict=True):
            if p.data_ptr() != view.data_ptr():
                view.copy_(p.detach())
                p.data = view

    def views_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Each parameter's part of a flat tensor laid out as the one at home."""
        return [
            flat[start : start + p.numel()].view(p.shape)
            for start, p in zip(self._places, self.masters, strict=True)
        ]
