"""Ids to the devices that hold the rows, rows back; gradients go the way that the rows came.

    device 0 wants 3 7 8   owner 0 has 0..4, owner 1 has 5..9
    sizes      0→0: 1  0→1: 2                all_to_all, every table's at once
    ids        0→0: 3  0→1: 7 8              all_to_all with uneven splits
    rows       0→0: r3 1→0: r7 r8            the same splits, backwards

All devices of the group call each of these together, also one that wants nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from evener.errors import PeerLostError

Group = dist.ProcessGroup | None


@dataclass(frozen=True)
class Route:
    """What one device asked of each owner, and what was asked of it: numbers of rows, and those rows' ids."""

    wanted: tuple[int, ...]
    asked: tuple[int, ...]
    ids_asked: torch.Tensor
    anybody: bool


class RowExchange:
    """Moves ids and rows between the devices of a group, in whose order owners are counted."""

    def __init__(self, world_size: int, group: Group = None) -> None:
        self.world_size, self._group = world_size, group
        self.num_bytes = 0  # of ids, rows and gradients that this device sent to others so far

    def routes(self, ids: Sequence[torch.Tensor], bounds: Sequence[Sequence[int]]) -> list[Route]:
        """Tell every owner which rows this device wants: for each table sorted ids, each once.

        Owner i of a table has its rows bounds[i] to bounds[i + 1].
        """
        wanted = torch.stack(
            [
                torch.diff(torch.searchsorted(own, torch.tensor(edges)))
                for own, edges in zip(ids, bounds, strict=True)
            ]
        )
        sizes = torch.cat([wanted, wanted.sum(1, keepdim=True).expand_as(wanted)])
        came = self._all_to_all(sizes.T.contiguous(), [1] * self.world_size, [1] * self.world_size)
        asked, totals = came.T.split(len(ids))
        routes = []
        for own, out, into, total in zip(ids, wanted.tolist(), asked.tolist(), totals, strict=True):
            theirs = self._all_to_all(own, out, into)
            routes.append(Route(tuple(out), tuple(into), theirs, bool(total.any())))
        return routes

    def rows_back(self, route: Route, rows: torch.Tensor) -> torch.Tensor:
        """`rows` are those of `route.ids_asked`; the rows that this device wanted, as its ids are ordered."""
        return self._all_to_all(rows, route.asked, route.wanted)

    def gradients_on(self, route: Route, rows: torch.Tensor) -> torch.Tensor:
        """The other way: `rows` belong to this device's ids; one for each of `route.ids_asked` arrives."""
        return self._all_to_all(rows, route.wanted, route.asked)

    def from_first(self, tensor: torch.Tensor) -> None:
        """Give everybody the group's first device's `tensor`, in place."""
        self._guarded(lambda: dist.broadcast(tensor, group=self._group, group_src=0))

    def summed(self, tensor: torch.Tensor) -> None:
        """Add up everybody's `tensor`, in place."""
        self._guarded(lambda: dist.all_reduce(tensor, group=self._group))

    def to_first(self, tensor: torch.Tensor, source: int, *, here: int) -> None:
        """Bring device number `source`'s `tensor` into that of the group's first device."""
        if here == source != 0:
            self._guarded(lambda: dist.send(tensor, group=self._group, group_dst=0))
        elif here == 0 != source:
            self._guarded(lambda: dist.recv(tensor, group=self._group, group_src=source))

    def _all_to_all(self, rows: torch.Tensor, out: Sequence[int], into: Sequence[int]) -> torch.Tensor:
        if self.world_size == 1:
            return rows
        made = rows.new_empty((sum(into), *rows.shape[1:]))
        self.num_bytes += rows[: sum(out)].nbytes
        self._guarded(
            lambda: dist.all_to_all_single(made, rows.contiguous(), list(into), list(out), group=self._group)
        )
        return made

    def _guarded(self, work: Callable[[], object]) -> None:
        try:
            work()
        except RuntimeError as e:
            raise PeerLostError(
                f"rows of a table could not be exchanged: another device left or went silent "
                f"({str(e).splitlines()[0]})",
                remedy="look for the first error of the other devices; the job can be started again",
            ) from e
