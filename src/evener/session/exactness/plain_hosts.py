"""Hosts that take steps by themselves, in plain PyTorch in one process: what such plans are held against.

Imports nothing of the runtime. Each host has a model and an optimiser of its own and its part of every batch.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from evener.core.fewer import Fewer

Gradients = list[Tensor | None]


@dataclass
class PlainHost:
    """One host: `gradient(step, parts)` adds up loss sums over lists of positions in the global batch.

    `loss_and_weight(indices)` are those of samples of the dataset; `around(step, positions)` is entered
    around forward and again around backward.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss_and_weight: Callable[[list[int]], tuple[Tensor, float]]
    max_norm: float | None
    around: Callable[[int, Sequence[int]], AbstractContextManager]
    first_gradient: dict[str, Tensor] = field(default_factory=dict)
    work: float = 0.0

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    def gradient(
        self, step: int, order: list[int], parts: Sequence[Sequence[int]]
    ) -> tuple[Gradients, float]:
        """The gradient of the summed loss, and its weight."""
        self.optimizer.zero_grad()
        whole = 0.0
        for positions in parts:
            if not positions:
                continue
            around = self.around(step, positions)
            with around:
                loss_sum, weight = self.loss_and_weight([order[i] for i in positions])
            if weight:
                with around:
                    loss_sum.backward()
                whole += weight
        return [p.grad for p in self.parameters], whole

    def move(self, gradients: Gradients) -> None:
        """One inner step by `gradients`."""
        for p, grad in zip(self.parameters, gradients, strict=True):
            p.grad = grad
        if self.max_norm is not None:
            nn.utils.clip_grad_norm_(self.parameters, self.max_norm)
        if not self.first_gradient:
            named = {id(p): n for n, p in reversed(list(self.model.named_parameters()))}
            held = {named[id(p)]: p.grad for p in self.parameters if p.grad is not None}
            self.first_gradient = {n: g.detach().cpu().clone() for n, g in held.items()}
        self.optimizer.step()


def run_hosts(
    hosts: Sequence[PlainHost],
    fewer: Fewer,
    batches: Sequence[tuple[list[int], list[list[list[int]]]]],
    set_rate: Callable[[PlainHost, int], None],
) -> dict[str, Tensor]:
    """The parameters with which all hosts end. `batches` has, by step, the order and each host's parts."""
    outer = _Outer(hosts, fewer) if fewer.how == "local" else None
    before: list[tuple[Gradients, float]] = [([], 0.0) for _ in hosts]
    for step, (order, parts) in enumerate(batches):
        now = []
        for host, own in zip(hosts, parts, strict=True):
            set_rate(host, step)
            grads, weight = host.gradient(step, order, own)
            now.append(([None if g is None else g.clone() for g in grads], weight))
        for i, host in enumerate(hosts):
            late = [before[j] for j in range(len(hosts)) if j != i] if outer is None else []
            told = [now[i], *((g, w) for g, w in late if w)]
            whole = sum(w for _, w in told)
            if whole:
                host.move([_mean(row, whole) for row in zip(*(g for g, _ in told), strict=True)])
                host.work += now[i][1]
        before = now
        if outer and ((step + 1) % (fewer.every or 1) == 0 or step + 1 == len(batches)):
            outer.meet()
    if outer is None:
        whole = sum(h.work for h in hosts)
        for row in zip(*(h.parameters for h in hosts), strict=True):
            mean = sum(h.work / whole * p.detach() for h, p in zip(hosts, row, strict=True))
            row[0].data.copy_(mean)
    return dict(hosts[0].model.named_parameters())


class _Outer:
    """DiLoCo: a Nesterov SGD on the mean change of all hosts, by the work that each has done."""

    def __init__(self, hosts: Sequence[PlainHost], fewer: Fewer) -> None:
        self._hosts = hosts
        self._anchor = [nn.Parameter(p.detach().clone()) for p in hosts[0].parameters]
        nesterov = fewer.momentum > 0
        self._sgd = torch.optim.SGD(self._anchor, lr=fewer.rate, momentum=fewer.momentum, nesterov=nesterov)

    def meet(self) -> None:
        whole = sum(h.work for h in self._hosts)
        for a, *row in zip(self._anchor, *(h.parameters for h in self._hosts), strict=True):
            changes = [h.work / whole * (a - p).detach() for h, p in zip(self._hosts, row, strict=True)]
            a.grad = torch.stack(changes).sum(0)
        self._sgd.step()
        for host in self._hosts:
            host.work = 0.0
            for a, p in zip(self._anchor, host.parameters, strict=True):
                p.data.copy_(a.detach())


def _mean(gradients: Sequence[Tensor | None], whole: float) -> Tensor | None:
    held = [g for g in gradients if g is not None]
    return torch.stack(held).sum(0) / whole if held else None
