"""Sums over devices: torch.distributed behind the seam, with staging where a backend cannot reach."""

from typing import Any

import torch
import torch.distributed as dist

from evener.core.seams import Pending, Wire
from evener.errors import PeerLostError


class GroupWire:
    """All-reduces over a torch.distributed group.

    Every transport error becomes a PeerLostError that names the reduction. Work objects are dropped on
    the first error: a Work kept alive keeps the group's sockets open and the other devices waiting.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group

    def all_reduce(self, buffer: torch.Tensor, key: str, *, exact_tail: int = 0) -> Pending:
        try:
            # The group's own method: the function around it takes 75 µs to check what is known here.
            group = self._group or dist.group.WORLD
            plain = torch.view_as_real(buffer) if buffer.is_complex() else buffer
            return _Reduction(group.allreduce([plain]), key)  # type: ignore[union-attr]  # it was joined
        except RuntimeError as e:
            raise _lost(key, e) from e


class StagedWire:
    """Carries an accelerator's buffers through host memory for a backend that only reaches the CPU."""

    def __init__(self, inner: Wire) -> None:
        self._inner = inner

    def all_reduce(self, buffer: torch.Tensor, key: str, *, exact_tail: int = 0) -> Pending:
        if buffer.device.type == "cpu":
            return self._inner.all_reduce(buffer, key, exact_tail=exact_tail)
        host = buffer.to("cpu")
        return _Staged(self._inner.all_reduce(host, key, exact_tail=exact_tail), host, buffer)


class SoloWire:
    """The wire of a job with one device: every sum is already there."""

    def all_reduce(self, buffer: Any, key: str, *, exact_tail: int = 0) -> Pending:
        return _Done()


class _Done:
    def wait(self) -> None:
        return


class _Reduction:
    def __init__(self, work: Any, key: str) -> None:
        self._work, self._key = work, key

    def wait(self) -> None:
        work, self._work = self._work, None
        try:
            work.wait()
        except RuntimeError as e:
            raise _lost(self._key, e) from e


class _Staged:
    def __init__(self, inner: Pending, host: torch.Tensor, buffer: torch.Tensor) -> None:
        self._inner, self._host, self._buffer = inner, host, buffer

    def wait(self) -> None:
        self._inner.wait()
        self._buffer.copy_(self._host)


def _lost(key: str, cause: RuntimeError) -> PeerLostError:
    # Gloo begins with a place in its source and ends with advice that is not for here.
    first_line = (
        str(cause).splitlines()[0].rpartition("cc:")[2].partition("] ")[2] or str(cause).splitlines()[0]
    )
    first_line = first_line.partition(". This is typically")[0]
    return PeerLostError(
        f"the sum of {key} failed: another device left or went silent ({first_line})",
        remedy="look for the first error of the other devices; the job can be started again",
    )
