"""PowerSGD (Vogels et al. 2019): values as a matrix of few columns times one of few rows.

    M (n × m, nearly square)      P = orthonormal(M · start)      Q = Mᵀ · P      sent: P and Q
    start of the next step = Q, its columns at length 1

One step of power iteration that goes on where the last one ended, so the columns turn to the directions in
which gradients of many steps are largest. What P · Qᵀ does not say is kept.
"""

import math

import torch
from torch import Tensor


class LowRank:
    """Rank `rank` of the values laid out as a nearly square matrix, float32.

    The matrix is the flat slice that a lane sends, not one parameter: where rows of both differ in length,
    gradients of low rank need more. A NaN or an infinity makes all values of the slice NaN.
    """

    keeps = True

    def __init__(self, rank: int, seed: int) -> None:
        self._rank, self._seed, self._places = rank, seed, 0
        self._start: Tensor | None = None

    def for_place(self) -> "LowRank":
        """One that goes on from its own last step."""
        self._places += 1
        return LowRank(self._rank, self._seed + 7919 * self._places)

    def num_bytes(self, count: int) -> int:
        rows, columns, rank = self._shape(count)
        return 4 * rank * (rows + columns)

    def encode(self, values: Tensor, out: Tensor, lost: Tensor | None = None) -> None:
        rows, columns, rank = self._shape(len(values))
        if not rank:
            return
        whole = torch.nn.functional.pad(values.float(), (0, rows * columns - len(values))).view(rows, columns)
        p, q = self._parts(out, len(values))
        if not bool(whole.abs().amax().isfinite()):
            out.view(torch.float32).fill_(float("nan"))
            if lost is not None:
                lost.zero_()
            return
        if self._start is None or self._start.shape != (columns, rank):
            draws = torch.Generator().manual_seed(self._seed)
            self._start = torch.randn(columns, rank, generator=draws)
        basis, _ = torch.linalg.qr(whole @ self._start)
        onto = whole.T @ basis
        p.copy_(basis.T)
        q.copy_(onto.T)
        # At length 1: squares of very small or large values leave the range of float32.
        self._start = onto / onto.norm(dim=0).clamp_min(torch.finfo(torch.float32).tiny)
        if lost is not None:
            lost.copy_((whole - basis @ onto.T).view(-1)[: len(values)])

    def decode(self, data: Tensor, out: Tensor, *, adds: bool = False) -> None:
        p, q = self._parts(data, out.numel())
        whole = torch.zeros(p.shape[1], q.shape[1])
        # Products and sums in one order: a matrix product's differs between kinds of processors.
        for column, row in zip(p, q, strict=True):
            whole += column[:, None] * row
        (out.add_ if adds else out.copy_)(whole.view(-1)[: out.numel()])

    def _shape(self, count: int) -> tuple[int, int, int]:
        columns = math.isqrt(count - 1) + 1 if count else 0
        rows = -(-count // columns) if count else 0
        return rows, columns, min(self._rank, rows, columns)

    def _parts(self, data: Tensor, count: int) -> tuple[Tensor, Tensor]:
        rows, columns, rank = self._shape(count)
        whole = data.view(torch.float32)
        return whole[: rank * rows].view(rank, rows), whole[rank * rows :].view(rank, columns)
