"""From traced programs to stages: where each cut lies, who holds what, and what is held twice."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from evener.errors import ModelError, PlanMismatchError
from evener.runtime.cutting.call import Call
from evener.runtime.cutting.checking import double
from evener.runtime.cutting.layers import Layout, layout_of
from evener.runtime.cutting.observing import Facts, observe, untouched
from evener.runtime.cutting.placing import Places, choose, in_run_order, name_of, windows
from evener.runtime.cutting.program import Program, TraceError, is_number, is_stateless
from evener.runtime.cutting.stage import Slot, StageModule, add_tensor, build, hold

MODES = (True, False)  # training, evaluation: glue may differ, as in F.dropout(x, 0.1, self.training)
Tie = tuple[tuple[int, str], ...]
Tracer = Callable[[nn.Module, dict[str, nn.Module], Call, tuple[Tensor, ...]], Program]


@dataclass(frozen=True, kw_only=True)
class CutPoint:
    """The place between two layers: `num_bytes` cross it in the example; `reason` says why none may."""

    after: str
    before: str
    legal: bool
    num_bytes: int = 0
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Traced:
    """A model's forward in one mode, and what it does at the example's size and at twice the samples."""

    places: Places
    doubled: Facts | None


def trace(
    tracer: Tracer, model: nn.Module, layout: Layout, call: Call, tensors: tuple[Tensor, ...]
) -> dict[bool, Traced]:
    """The forward in both modes, written down by `tracer`; TraceError where it cannot be."""
    return {mode: _trace(tracer, model, layout, call, tensors, mode) for mode in MODES}


def _trace(
    tracer: Tracer, model: nn.Module, layout: Layout, call: Call, tensors: tuple[Tensor, ...], training: bool
) -> Traced:
    def run(work: Callable[..., Any], *args: Any) -> Any:
        with untouched(model):
            model.train(training)
            return work(*args)

    program = run(tracer, model, layout.modules, call, tuple(t.detach().clone() for t in tensors))
    try:
        facts = run(observe, program, model, tuple(t.detach().clone() for t in tensors))
    except Exception as error:
        raise TraceError(f"the {program.tracer} forward does not run a second time: {error}") from error
    try:
        doubled = run(observe, program, model, double(tensors)[0])
    except Exception:  # the model or the recorded steps hold for this size only; the check tells which
        doubled = None
    return Traced(places=Places(program, facts), doubled=doubled)


def points(traced: dict[bool, Traced], model: nn.Module, names: list[str]) -> tuple[CutPoint, ...]:
    """The cut points between neighbours of `names`."""
    return tuple(_point(traced, model, names, b) for b in range(1, len(names)))


def _point(traced: dict[bool, Traced], model: nn.Module, names: list[str], b: int) -> CutPoint:
    layout = layout_of(model, [names[:b], names[b:]])
    num_bytes, reason = 0, ""
    for x in traced.values():
        position, why = choose(x.places, windows(x.places, layout)[0])
        reason = reason or why
        num_bytes = max(num_bytes, 0 if position is None else x.places.num_bytes(position))
    return CutPoint(after=names[b - 1], before=names[b], legal=not reason, num_bytes=num_bytes, reason=reason)


def _positions(model: nn.Module, layout: Layout, traced: dict[bool, Traced], mode: bool) -> list[int]:
    """Where each stage begins, and the end of the last."""
    places = traced[mode].places
    cuts = [0]
    for b, window in enumerate(windows(places, layout)):
        position, why = choose(places, window, cuts[-1])
        if position is None:
            raise _illegal(model, layout, traced, b, why)
        cuts.append(position)
    return [*cuts, len(places.nodes)]


def _illegal(
    model: nn.Module, layout: Layout, traced: dict[bool, Traced], b: int, why: str
) -> PlanMismatchError:
    names = list(layout.order)
    last = [n for n in names if layout.stage_of[n] == b][-1]
    first = names[names.index(last) + 1]
    legal = [f"{p.after} | {p.before}" for p in points(traced, model, names) if p.legal]
    order = in_run_order(traced[True].places, names)
    remedy = f"cut at one of {', '.join(legal)}" if legal else "no cut between these layers is legal"
    if order != names:
        remedy += f"; the layers run in the order {', '.join(order)}"
    return PlanMismatchError(
        f"the model cannot be cut between {last!r} and {first!r}: {why}",
        numbers=f"{len(legal)} of {len(names) - 1} cut points are legal",
        remedy=remedy,
    )


@dataclass(frozen=True, kw_only=True)
class Assembled:
    """Stages, parameters with several holders, and what a person should know."""

    stages: tuple[StageModule, ...]
    ties: tuple[Tie, ...]
    notes: tuple[str, ...]


def assemble(
    model: nn.Module, layout: Layout, traced: dict[bool, Traced], tensors: tuple[Tensor, ...]
) -> Assembled:
    """Stages as `layout` says; PlanMismatchError for an illegal cut, naming the legal ones."""
    cuts = {mode: _positions(model, layout, traced, mode) for mode in MODES}
    batch = tensors[0].shape[0] if tensors[0].dim() else 1
    slots = [{m: _slots(traced[m], cuts[m][s], batch) for m in MODES} for s in range(layout.num_stages + 1)]
    constants = {n: t for x in traced.values() for n, t in x.places.program.constants.items()}
    used = {n for n in layout.modules for x in traced.values() if x.places.uses(n)}
    stages, notes = [], []
    for s in range(layout.num_stages):
        parts = {
            m: build(traced[m].places, model, cuts[m][s], cuts[m][s + 1], tensors[0].device) for m in MODES
        }
        layers = list(dict.fromkeys(name for part in parts.values() for name in part.layers))
        layers += [n for n in layout.modules if layout.stage_of[n] == s and n not in used]
        own = {n: traced[m].places.program.attribute(model, n) for m in MODES for n in parts[m].own}
        held = hold(model, layers, own, set(constants))
        stages.append(StageModule(held, parts, slots[s], slots[s + 1], frozenset(constants)))
        notes += [note for part in parts.values() for note in part.notes]
        notes += _moved(layout, layers, s, used)
    notes += _place_rest(model, layout, stages)
    _check_holders(model, stages)
    return Assembled(stages=tuple(stages), ties=_ties(stages), notes=tuple(dict.fromkeys(notes)))


def _slots(traced: Traced, cut: int, batch: int) -> tuple[Slot, ...]:
    """The carry at a cut. What grows when the samples are doubled is split by samples, the rest is whole."""
    slots = []
    for node in traced.places.crossing(cut):
        seen = traced.places.facts.seen[node]
        twice = traced.doubled.seen[node].shape if traced.doubled else seen.shape
        grown = [d for d, (a, b) in enumerate(zip(seen.shape, twice, strict=True)) if a != b]
        dim = grown[0] if len(grown) == 1 and twice[grown[0]] == 2 * seen.shape[grown[0]] else None
        slots.append(
            Slot(
                name=name_of(node),
                kind="size" if is_number(node) else "tensor",
                sample_dim=dim,
                per_sample=0 if dim is None else seen.shape[dim] // batch,
                num_bytes=seen.num_bytes,
                dtype=seen.dtype,
            )
        )
    return tuple(slots)


def _moved(layout: Layout, layers: list[str], stage: int, used: set[str]) -> list[str]:
    """Sentences about layers that run, or run also, in another stage than the one that names them."""
    strangers = [
        n for n in layers if layout.stage_of.get(n, stage) != stage and not is_stateless(layout.modules[n])
    ]
    here = [n for n in layout.modules if layout.stage_of[n] == stage]
    return [
        *(
            f"{n!r}, of stage {layout.stage_of[n]}, runs in stage {stage}: there the forward calls it"
            for n in strangers
        ),
        *(f"{n!r} is never called: stage {stage} only keeps it" for n in here if n not in used),
    ]


def _place_rest(model: nn.Module, layout: Layout, stages: list[StageModule]) -> list[str]:
    """Tensors of containers live where they are used; those that nothing uses, where they are named."""
    notes = []
    for layer in layout.order:
        if layer in layout.modules:
            continue
        stage = layout.stage_of[layer]
        for name, tensor in layout.tensors_of(model, layer).items():
            holders = [s for s, x in enumerate(stages) if name in x.named]
            if not holders:
                add_tensor(stages[stage].held, model, name, tensor)
                notes.append(f"{name!r} is never used: stage {stage} only keeps it")
            elif holders != [stage]:
                where = " and ".join(map(str, holders))
                notes.append(f"{name!r}, of stage {stage}, is held by stage {where}: there it is used")
    return notes


def _ties(stages: list[StageModule]) -> tuple[Tie, ...]:
    holders: dict[int, list[tuple[int, str]]] = {}
    for s, stage in enumerate(stages):
        for name, tensor in stage.named.items():
            if isinstance(tensor, nn.Parameter):
                holders.setdefault(id(tensor), []).append((s, name))
    return tuple(tuple(group) for group in holders.values() if len({s for s, _ in group}) > 1)


def _check_holders(model: nn.Module, stages: list[StageModule]) -> None:
    """Everything is in some stage, and no memory belongs to two parameters of different stages."""
    placed: set[int] = set()
    memory: dict[int, dict[int, str]] = {}
    for stage in stages:
        for name, tensor in stage.named.items():
            placed.add(id(tensor))
            if tensor.numel() and not tensor.is_meta:
                memory.setdefault(tensor.data_ptr(), {})[id(tensor)] = name
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if id(tensor) not in placed:
            raise ModelError(f"{name!r} found no place in any stage", remedy="name its layer in a stage")
    for names in memory.values():
        if len(names) > 1:
            shared = [s for s, x in enumerate(stages) if any(n in x.named for n in names.values())]
            if len(shared) > 1:
                raise ModelError(
                    f"{' and '.join(sorted(names.values()))} are two parameters in the same memory",
                    numbers=f"stages {shared}",
                    remedy="tie them by assigning one Parameter to both modules",
                )
