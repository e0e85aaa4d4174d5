"""Sums over devices: torch.distributed behind the seam, with staging where a backend cannot reach."""

from typing import Any

import torch
import torch.distributed as dist

from evener.core.seams import Pending, Wire
from evener.errors import PeerLostError


class GroupWire:
    """All-reduces over a torch.distributed group.

    Every transport error becomes a PeerLostError that names the reduction. Work objects are dropped on
    the first error: a Work kept alive keeps the group's sockets open and the other devices waiting. What was
    waited for is there: a vendor's library lets the device wait and not the host, which would then tell the
    others that it has a sum that may never come.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group

    def all_reduce(self, buffer: torch.Tensor, key: str, *, exact_tail: int = 0) -> Pending:
        try:
            # The group's own method: the function around it takes 75 µs to check what is known here.
            group = self._group or dist.group.WORLD
            plain = torch.view_as_real(buffer) if buffer.is_complex() else buffer
            work = group.allreduce([plain])  # type: ignore[union-attr]  # it was joined
            return _Reduction(work, key, buffer.device)
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
    def __init__(self, work: Any, key: str, device: torch.device) -> None:
        self._work, self._key, self._device = work, key, device

    def wait(self) -> None:
        work, self._work = self._work, None
        try:
            work.wait()
            if self._device.type != "cpu":
                torch.accelerator.current_stream(self._device).synchronize()
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
