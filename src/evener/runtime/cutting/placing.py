"""Where a program is cut: at the point between two layers where the fewest bytes cross.

    embed  add-position  blocks.0  add  blocks.1  norm  head
                       ▲              ▲
        window of the cut between embed and blocks.0: after embed, before blocks.0

Steps keep their order, so what is written in place and what is drawn at random stays as in the whole model.
Layers without parameters (an activation used everywhere, rotary angles) run where the forward calls them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import fx

from evener.core.layers import ROOT, run_order
from evener.runtime.cutting.layers import Layout
from evener.runtime.cutting.observing import Facts
from evener.runtime.cutting.program import ARITHMETIC, Program, is_number


@dataclass(frozen=True, kw_only=True)
class Window:
    """Positions at which the cut behind a stage may lie, first and last; none where `reason` says why."""

    first: int
    last: int
    reason: str = ""


class Places:
    """The steps of one program, the layers they call, and what crosses between any two of them."""

    def __init__(self, program: Program, facts: Facts) -> None:
        self.program, self.facts = program, facts
        self.nodes = program.nodes
        self.position = {n: i for i, n in enumerate(self.nodes)}
        self.calls: dict[str, list[int]] = {}
        for i, node in enumerate(self.nodes):
            if node.op == "call_module":
                self.calls.setdefault(str(node.target), []).append(i)

    def uses(self, layer: str) -> list[int]:
        """Where `layer` is called, or, if it never is, where glue reads its parameters and buffers."""
        if layer in self.calls or layer == ROOT:
            return self.calls.get(layer, [])
        read = [n for n in self.program.graph.find_nodes(op="get_attr") if n.target.startswith(f"{layer}.")]
        return sorted({self.position[user] for node in read for user in node.users if user in self.position})

    @cached_property
    def _last_use(self) -> dict[fx.Node, int]:
        last = {}
        for node in [*self.program.inputs, *self.nodes]:
            uses = [self.position.get(user, len(self.nodes)) for user in node.users]
            last[node] = max(uses, default=-1)
        return last

    def crossing(self, cut: int) -> tuple[fx.Node, ...]:
        """What must be carried over the cut before step `cut`; 0 is the model's own input."""
        if cut == 0:
            return tuple(self.program.inputs)
        if cut == len(self.nodes):
            return tuple(self.program.outputs)
        needed: dict[fx.Node, None] = {}
        for node in [*self.program.inputs, *self.nodes[:cut]]:
            if self._last_use[node] >= cut:
                needed.update(dict.fromkeys(self.sources(node)))
        return tuple(sorted(needed, key=self._order))

    def _order(self, node: fx.Node) -> int:
        return self.position[node] if node in self.position else self.program.inputs.index(node) - 10**9

    def sources(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """What to carry so that a later stage has `node`: itself, or the inputs it is computed again from."""
        sources = self.repeatable.get(node, (node,))
        pays = is_number(node) or self._bytes(sources) < self._bytes((node,))
        return sources if pays else (node,)

    def _bytes(self, nodes: Sequence[fx.Node]) -> int:
        return sum(self.facts.seen[n].num_bytes for n in nodes)

    @cached_property
    def repeatable(self) -> dict[fx.Node, tuple[fx.Node, ...]]:
        """What each step that may run again is computed from: sizes, the model's input, constant buffers."""
        found: dict[fx.Node, tuple[fx.Node, ...]] = {n: (n,) for n in self.program.inputs}
        for node in self.program.graph.find_nodes(op="get_attr"):
            if not self.facts.seen[node].needs_gradient and node.target not in self.facts.mutated:
                found[node] = ()  # a constant: every stage may hold it
        for node in self.nodes:
            inputs = node.all_input_nodes
            if is_number(node):
                if all(is_number(i) for i in inputs) and node.target in ARITHMETIC:
                    found[node] = _union(found[i] for i in inputs)
                else:
                    found[node] = (node,)
            elif self._repeats(node) and all(i in found for i in inputs):
                found[node] = _union(found[i] for i in inputs)
        return found

    def _repeats(self, node: fx.Node) -> bool:
        facts = self.facts
        plain = node.op != "call_module" and node not in facts.random and node not in facts.writes
        seen = facts.seen[node]
        written = any(seen.memory & memory for memory in facts.writes.values())
        return plain and seen.kind == "tensor" and not seen.needs_gradient and not written

    def obstacle(self, cut: int) -> str:
        """Why nothing can carry what crosses before step `cut`; empty when something can."""
        crossing = self.crossing(cut)
        seen = self.facts.seen
        if not crossing:
            return "nothing of the input reaches what is after the cut"
        for node in crossing:
            if seen[node].kind not in ("tensor", "number"):
                return f"{name_of(node)} gives a {seen[node].kind}, no tensor, which is used after the cut"
            if seen[node].kind == "number" and not isinstance(seen[node].shape[0], int):
                return f"{name_of(node)} gives a fraction that is used after the cut"
        for name, first, last in self._stateful:
            if first < cut <= last:
                return f"the forward uses {name!r} before and after the cut, and writes to it"
        for writer, memory in self.facts.writes.items():
            sharing = [n for n in crossing if seen[n].memory & memory]
            if self.position[writer] >= cut and len(sharing) > 1:
                names = " and ".join(name_of(n) for n in sharing)
                return f"{names} share memory that {name_of(writer)} writes in place after the cut"
        return ""

    @cached_property
    def _stateful(self) -> list[tuple[str, int, int]]:
        """(buffer, first use, last use) of what the forward writes to: two copies would drift apart."""
        found = []
        for name in sorted(self.facts.mutated):
            uses = [i for layer, at in self.calls.items() if name.startswith(f"{layer}.") for i in at]
            for node in self.program.graph.find_nodes(op="get_attr", target=name):
                uses += [self.position[user] for user in node.users if user in self.position]
            if uses:
                found.append((name, min(uses), max(uses)))
        return found

    def num_bytes(self, cut: int) -> int:
        return self._bytes(self.crossing(cut))

    def written_in(self, start: int, end: int, node: fx.Node) -> list[fx.Node]:
        """The steps in [start, end) that write in place to the memory of `node`."""
        memory = self.facts.seen[node].memory
        return [w for w, m in self.facts.writes.items() if start <= self.position[w] < end and m & memory]


def _union(parts) -> tuple[fx.Node, ...]:
    return tuple(dict.fromkeys(node for part in parts for node in part))


def name_of(node: fx.Node) -> str:
    """A step as a person would name it: the layer, the input, or the function and what is before it."""
    if node.op == "call_module":
        return f"layer {str(node.target)!r}"
    if node.op == "placeholder":
        return f"the model's {node.name}"
    if node.op == "get_attr":
        return str(node.target)
    before: fx.Node | None = node
    while before is not None and before.op in ("call_function", "call_method"):
        before = next((i for i in before.all_input_nodes if i.op != "get_attr"), None)
    function = getattr(node.target, "__name__", str(node.target))
    return f"{function}()" + (f" after {name_of(before)}" if before is not None else "")


def windows(places: Places, layout: Layout) -> list[Window]:
    """Where the cut behind each stage but the last may lie.

    The first calls of layers with parameters bind; then, where they leave room, layers that are called more
    than once stay whole and layers without parameters stay where they are named.
    """
    uses = {n: at for n in layout.modules if (at := places.uses(n))}
    strict = [n for n in uses if any(True for _ in layout.modules[n].parameters())]
    starts = {n: uses[n][0] for n in strict}
    found = [_window(starts, layout, b, len(places.nodes)) for b in range(layout.num_stages - 1)]
    for name in [n for n in strict if len(uses[n]) > 1] + [n for n in uses if n not in strict]:
        tighter = _with_all_calls(found, uses[name], layout.stage_of[name])
        if all(w.first <= w.last or w.reason for w in tighter):
            found = tighter
    return found


def _window(starts: dict[str, int], layout: Layout, stage: int, end: int) -> Window:
    """After the first call of every layer up to `stage`, before that of any later layer."""
    done = [(at + 1, n) for n, at in starts.items() if layout.stage_of[n] <= stage]
    to_come = [(at, n) for n, at in starts.items() if layout.stage_of[n] > stage]
    first, before = max(done, default=(0, ""))
    last, after = min(to_come, default=(end, ""))
    reason = "" if first <= last else f"{before!r} runs after {after!r}"
    return Window(first=first, last=last, reason=reason)


def _with_all_calls(found: list[Window], calls: list[int], stage: int) -> list[Window]:
    tighter = []
    for b, window in enumerate(found):
        first = max(window.first, calls[-1] + 1) if stage <= b else window.first
        last = min(window.last, calls[0]) if stage > b else window.last
        tighter.append(window if window.reason else Window(first=first, last=last))
    return tighter


def choose(places: Places, window: Window, after: int = 0) -> tuple[int | None, str]:
    """The cut in `window`, behind step `after`, with the fewest bytes; None and why if there is none."""
    if window.reason:
        return None, window.reason
    best: tuple[int, int] | None = None
    reason = "the stage before it would have nothing to run"
    for cut in range(max(window.first, after + 1), min(window.last, len(places.nodes) - 1) + 1):
        if why := places.obstacle(cut):
            reason = why
        elif best is None or places.num_bytes(cut) <= best[0]:
            best = (places.num_bytes(cut), cut)
    return (best[1], "") if best else (None, reason)


def in_run_order(places: Places, names: Sequence[str]) -> list[str]:
    """`names` in the order in which they run; what is never called stays beside the name before it."""
    return run_order(names, {name: at[0] for name in names if (at := places.uses(name))})
