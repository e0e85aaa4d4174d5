"""Backward in two parts: gradients of what came in, which others wait for, then those of the parameters.

    output ──► c ──► b ──► a ──► input      first: the ways that end at an input (c, b, a); what arrives at
               │     │     │                nodes from which a way to a parameter leaves is kept
               w     v     u                later: from each of those nodes on, only to its parameters

Built on the public autograd graph alone: nodes, their hooks, gradient edges. Autograd itself tells a node's
work for its input from that for its parameters; one that does both at once (a fused LSTM) runs twice.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Gradients = tuple[Tensor | None, ...]


@dataclass
class _Group:
    """Parameters (as bits) that share nodes; `kept` maps such a node to the gradients that arrived at it.

    `outputs` are numbers of outputs that meet no input on their way to these parameters.
    """

    bits: int
    kept: dict[Node, Gradients | None] = field(default_factory=dict)
    outputs: list[int] = field(default_factory=list)


class SplitBackward:
    """One backward from `outputs`: first `of_inputs`, then, any time later, `of_parameters`.

    Together they are the gradients of one whole backward. `at_once` has the first part do the work of both:
    for a graph that recomputes what it needs, which would do so once more for every walk.
    Example: y = 3·w·x with w = 2, x = 5: of_inputs([1]) is [6], then of_parameters() is [(w, 15)].
    """

    def __init__(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        parameters: Iterable[Tensor],
        *,
        at_once: bool = False,
    ) -> None:
        self._done: list[tuple[Tensor, Tensor]] = []
        self._at_once = at_once
        self._outputs, self._inputs, self._parameters = list(outputs), list(inputs), list(parameters)
        self._edges = [get_gradient_edge(t) for t in self._outputs]
        self._seeds: list[Tensor] = []
        self._groups: list[_Group] = []
        if at_once:
            return
        self._groups = _groups(
            [edge.node for edge in self._edges],
            {get_gradient_edge(t).node for t in self._inputs},
            {get_gradient_edge(p).node: 1 << i for i, p in enumerate(self._parameters)},
        )

    def of_inputs(self, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """Gradients of the inputs, from those of the outputs; None for an input that nothing used."""
        self._seeds = list(gradients)
        if self._at_once:
            return self._of_all()
        if not self._inputs:
            return []
        hooks = [
            node.register_prehook(_keep(group.kept, node)) for group in self._groups for node in group.kept
        ]
        try:
            found = torch.autograd.grad(
                self._outputs, self._inputs, self._seeds, retain_graph=True, allow_unused=True
            )
        finally:
            for hook in hooks:
                hook.remove()
        return list(found)

    def of_parameters(self) -> list[tuple[Tensor, Tensor]]:
        """Each parameter with its gradient; those that no output used are left out. Lets go of the graph."""
        found = self._done + [pair for group in self._groups for pair in self._of_group(group)]
        self._outputs, self._edges, self._groups, self._done = [], [], [], []
        return found

    def _of_all(self) -> list[Tensor | None]:
        found = torch.autograd.grad(
            self._outputs, [*self._inputs, *self._parameters], self._seeds, allow_unused=True
        )
        own = zip(self._parameters, found[len(self._inputs) :], strict=True)
        self._done = [(p, g) for p, g in own if g is not None]
        return list(found[: len(self._inputs)])

    def _of_group(self, group: _Group) -> list[tuple[Tensor, Tensor]]:
        kept = {node: gradients for node, gradients in group.kept.items() if gradients is not None}
        starts = [
            (GradientEdge(node, i), gradient)
            for node, gradients in kept.items()
            for i, gradient in enumerate(gradients)
            if gradient is not None
        ]
        starts += [(self._edges[i], self._seeds[i]) for i in group.outputs]
        if not starts:
            return []
        parameters = [p for i, p in enumerate(self._parameters) if group.bits >> i & 1]
        # A node behind another one of the group has its whole gradient already: what comes again is dropped.
        hooks = [node.register_prehook(_as_before(g)) for node, g in kept.items()] if len(kept) > 1 else []
        try:
            gradients = torch.autograd.grad(
                [edge for edge, _ in starts],
                parameters,
                [seed for _, seed in starts],
                retain_graph=True,
                allow_unused=True,
            )
        finally:
            for hook in hooks:
                hook.remove()
        return [(p, g) for p, g in zip(parameters, gradients, strict=True) if g is not None]


def _keep(kept: dict[Node, Gradients | None], node: Node) -> Callable[[Gradients], None]:
    def hook(gradients: Gradients) -> None:
        kept[node] = gradients

    return hook


def _as_before(gradients: Gradients) -> Callable[[Gradients], Gradients]:
    return lambda _: gradients


def _groups(outputs: list[Node], inputs: set[Node], parameters: dict[Node, int]) -> list[_Group]:
    """Nodes on a way to an input from which ways to parameters leave, in groups that share no parameter."""
    to_input: dict[Node, bool] = {}
    bits: dict[Node, int] = {}  # parameters reached without passing a node that leads to an input
    for node, followers in _from_the_ends(outputs):
        to_input[node] = node in inputs or any(to_input[n] for n in followers)
        bits[node] = parameters.get(node, 0)
        for n in followers:
            if not to_input[n]:
                bits[node] |= bits[n]
    groups: list[_Group] = []
    for node in to_input:
        if to_input[node] and bits[node]:
            _join(groups, _Group(bits[node], kept={node: None}))
    for number, node in enumerate(outputs):
        if not to_input[node] and bits[node]:
            _join(groups, _Group(bits[node], outputs=[number]))
    return groups


def _join(groups: list[_Group], new: _Group) -> None:
    """Add `new`, made one with all that share a parameter with it."""
    for group in [g for g in groups if g.bits & new.bits]:
        groups.remove(group)
        new.bits |= group.bits
        new.kept |= group.kept
        new.outputs += group.outputs
    groups.append(new)


def _from_the_ends(outputs: list[Node]) -> Iterable[tuple[Node, list[Node]]]:
    """(node, what it passes gradients to), each node after all that it passes gradients to."""
    followers: dict[Node, list[Node]] = {}
    done: set[Node] = set()
    stack = list(outputs)
    while stack:
        node = stack[-1]
        if node in done:
            stack.pop()
        elif node not in followers:
            followers[node] = list(dict.fromkeys(n for n, _ in node.next_functions if n is not None))
            stack += [n for n in followers[node] if n not in done]
        else:
            stack.pop()
            done.add(node)
            yield node, followers[node]
