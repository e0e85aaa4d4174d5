"""Cutting an unmodified model into stages that can run on devices of their own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from evener.errors import ModelError
from evener.runtime.cutting.assembling import CutPoint, Tie, Traced, assemble, points, trace
from evener.runtime.cutting.call import Call, Example, call_of
from evener.runtime.cutting.checking import Checker, double, shorter
from evener.runtime.cutting.exporting import export
from evener.runtime.cutting.layers import layer_names, layout_of
from evener.runtime.cutting.observing import untouched
from evener.runtime.cutting.placing import in_run_order
from evener.runtime.cutting.program import Program, TraceError, is_number
from evener.runtime.cutting.recording import record
from evener.runtime.cutting.stage import StageModule


@dataclass(frozen=True, kw_only=True, eq=False)
class Cut:
    """A model in stages. Chained, the stages compute what the model computes, forward and backward.

    `ties` groups the (stage, parameter name) holders of each parameter that several stages hold: their
    gradients must be summed and their values kept equal. `tracer` says how the forward was written down,
    `notes` what a person should know.
    """

    stages: tuple[StageModule, ...]
    ties: tuple[Tie, ...]
    notes: tuple[str, ...]
    tracer: str
    call: Call
    programs: dict[bool, Program]

    def flatten(self, args: Sequence, kwargs: dict) -> tuple[Tensor, ...]:
        """The carry that enters the first stage; ModelError for a call that is unlike the example."""
        return self.call.flatten(args, kwargs)

    def unflatten_output(self, carry: Sequence[Tensor]) -> Any:
        """The model's output from the carry that leaves the last stage."""
        program = self.programs[self.stages[-1].training]
        pairs = zip(program.outputs, carry, strict=True)
        return program.unflatten([t.shape[0] if is_number(node) else t for node, t in pairs])


def cut(model: nn.Module, stages: Sequence[Sequence[str]], *, example: Example) -> Cut:
    """Cut `model` into `stages`, lists of layer names; the layers and parameters stay the model's own
    objects.

    `example` is (args, kwargs) of one micro-batch; the model is run on it a few times and left as it was. Its
    forward is recorded while it runs, or else taken from torch.export. The stages are then compared with the
    model: outputs and gradients in training and evaluation, and outputs at other sizes.
    Errors: UnknownNameError, PlanMismatchError (lists that do not fit, or a cut that nothing can carry; the
    legal cuts are listed), ModelError (a forward that cannot be cut at all, and why).
    Example: cut(model, [["embed", "blocks.0"], ["blocks.1", "head"]], example=((ids,), {})).
    """
    layout = layout_of(model, stages)
    call, tensors, notes = call_of(model, example)
    _call_once(model, call, tensors)

    def attempt(tracer: Any) -> Cut:
        traced = trace(tracer, model, layout, call, tensors)
        assembled = assemble(model, layout, traced, tensors)
        found = Cut(
            stages=assembled.stages,
            ties=assembled.ties,
            notes=(*notes, *assembled.notes),
            tracer=traced[True].places.program.tracer,
            call=call,
            programs={mode: x.places.program for mode, x in traced.items()},
        )
        return _checked(model, found, tensors)

    return _first_that_works(model, attempt)


def legal_cuts(model: nn.Module, *, example: Example) -> tuple[CutPoint, ...]:
    """Each place between neighbouring layers, as they run: whether the model can be cut there, and why not.

    Errors as `cut`. Example: four layers have three cut points.
    """
    names = list(layer_names(model))
    layout = layout_of(model, [[n] for n in names])
    call, tensors, _ = call_of(model, example)
    _call_once(model, call, tensors)
    traced: dict[bool, Traced] = _first_that_works(model, lambda t: trace(t, model, layout, call, tensors))
    return points(traced, model, in_run_order(traced[True].places, names))


def _first_that_works(model: nn.Module, attempt: Callable[[Any], Any]) -> Any:
    refusals = []
    for tracer in (record, export):
        try:
            return attempt(tracer)
        except TraceError as error:
            refusals.append(str(error))
    raise ModelError(
        f"the forward of {type(model).__name__} cannot be cut: {refusals[0]}",
        numbers=f"tried after that: {refusals[1]}",
        remedy="name a shallower layer that hides the part in question, or put it into a module of its own",
    )


def _call_once(model: nn.Module, call: Call, tensors: tuple[Tensor, ...]) -> None:
    """So that an example which does not fit the model is told apart from a model that cannot be cut."""
    args, kwargs = call.unflatten(tuple(t.detach().clone() for t in tensors))
    try:
        with untouched(model), torch.no_grad():
            model(*args, **kwargs)
    except Exception as error:
        raise ModelError(
            f"{type(model).__name__} raised when called with the example: {type(error).__name__}: {error}",
            remedy="an example ((args...), {kwargs}) with which model(*args, **kwargs) runs",
        ) from error


def _checked(model: nn.Module, found: Cut, tensors: tuple[Tensor, ...]) -> Cut:
    """`found` with the sizes that may change; TraceError where the stages compute something else."""
    checker = Checker(model, found.call, found.stages, found.unflatten_output)
    free, notes = frozenset[tuple[int, int]](), list(found.notes)
    try:
        for training in (True, False):
            checker.check(tensors, training=training)
        doubled, places = double(tensors)
        if not checker.accepts(doubled):
            notes.append(
                "the model does not run with twice the samples: the micro-batch must stay as in the example"
            )
        elif not checker.agrees(doubled):
            raise TraceError("the forward takes other steps when the number of samples changes")
        else:
            free |= places
        for places, variants in shorter(tensors):
            accepted = [v for v in variants if checker.accepts(v)]
            if accepted and all(checker.agrees(v) for v in accepted):
                free |= places
            elif accepted:
                names = ", ".join(f"{found.call.names[i]} dimension {d}" for i, d in sorted(places))
                notes.append(f"the forward takes other steps when a size changes, which is fixed: {names}")
        if any(t.is_meta for t in [*tensors, *model.parameters()]):
            notes.append("on the meta device the stages could be compared with the model by shape only")
    finally:
        for stage in found.stages:
            stage.training = model.training
    return replace(found, call=replace(found.call, free=free), notes=tuple(notes))
