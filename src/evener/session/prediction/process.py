"""One process's part of a prediction: outputs for a dataset, in its order, through any plan.

forwards of the plan ──► the last stages keep their outputs ──► the leading device puts them in order
"""

import dataclasses
from pathlib import Path
from typing import Any

from torch import Tensor

from evener.core.figures import Value
from evener.core.fleet import Fleet
from evener.core.plan import Pipeline, Plan, Share, Stage
from evener.errors import DataError, OutOfMemoryError
from evener.runtime.agreement import judge
from evener.runtime.ranks import Ranks
from evener.runtime.replicas import spread_state
from evener.session.layout.lay_out import lay_out
from evener.session.layout.seat import Seat
from evener.session.layout.tables import take_out
from evener.session.loop.heldout import Heldout, mean_of, pass_over
from evener.session.loop.steps import Steps
from evener.session.meeting import OUTCOME, Meeting
from evener.session.planning.agreed import agreed_plan, prepared
from evener.session.planning.placing import Placing, settled
from evener.session.prediction.outputs import Keeper, gathered, write_outputs
from evener.session.recipe import Recipe, load_recipe
from evener.session.request import Prediction, Request
from evener.session.site import Site, backend_of, site_of
from evener.session.worker import telling


@dataclasses.dataclass(frozen=True, kw_only=True)
class Predictions:
    """Outputs in the order of the dataset, sample by sample along the first dimension.

    A model that returns one tensor has `outputs["output"]`; a mapping's tensors have its keys, a sequence's
    the keys "0", "1", .... `score` is the loss and the metrics, where they were asked for. `notes` say what
    of the model's output was left out.
    """

    outputs: dict[str, Tensor]
    plan: Plan
    score: Heldout | None = None
    notes: tuple[str, ...] = ()


class Predicted(Value, frozen=True, kw_only=True):
    """What a run of `evener predict` wrote: shape and dtype of each output, and the score if asked for."""

    out: str
    samples: int
    outputs: dict[str, tuple[tuple[int, ...], str]]
    loss: float | None = None
    metrics: dict[str, float] = {}
    notes: tuple[str, ...] = ()


def predict_to_file(request: Request, meeting: Meeting) -> Predicted | None:
    """`predict_with` as the processes of `evener predict` run it: the leading one writes the file."""
    assert request.predict is not None
    with telling(meeting, request.fleet.devices[meeting.rank].name):
        found = predict_with(request, meeting)
        return None if found is None else _written(found, request.predict, meeting)


def _written(found: Predictions, wanted: Prediction, meeting: Meeting) -> Predicted:
    path = Path(wanted.out)
    write_outputs(path, found.outputs)
    told = Predicted(
        out=str(path),
        samples=len(next(iter(found.outputs.values()))),
        outputs={n: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in found.outputs.items()},
        loss=found.score.loss if found.score else None,
        metrics=found.score.metrics if found.score else {},
        notes=found.notes,
    )
    meeting.put(OUTCOME, told)
    return told


def predict_with(
    request: Request, meeting: Meeting, recipe: Recipe | None = None, dataset: Any = None
) -> Predictions | None:
    """This process's part; the predictions on the leading process, None elsewhere.

    `dataset` is by default what `request.predict` names. DataError for one without samples, ModelError for
    outputs that cannot be put in one order, and what a run may raise.
    """
    site = site_of(request, meeting.rank)
    recipe = prepared(recipe or load_recipe(request.script, request.seed), request)
    recipe, placing = settled(recipe, request, meeting)
    try:
        data = _chosen(recipe, request) if dataset is None else dataset
        if len(data) == 0:
            raise DataError("there is nothing to predict for", numbers="0 samples")
        fleet, plan = _plan(request, meeting, recipe, site, placing)
        used = tuple(d.name for d in fleet.devices if d.name in plan.devices)
        if site.device.name not in used:
            return None
        return _predict(request, meeting.within("predicting"), recipe, data, site, fleet, plan)
    finally:
        take_out(recipe.model)


def _chosen(recipe: Recipe, request: Request) -> Any:
    wanted = request.predict.data if request.predict else "dataset"
    data = recipe.heldout if wanted == "heldout" else recipe.dataset
    if data is None:
        raise DataError("the recipe has no held-out samples", remedy="--data dataset, or heldout= in it")
    return data


def _plan(
    request: Request, meeting: Meeting, recipe: Recipe, site: Site, placing: Placing
) -> tuple[Fleet, Plan]:
    """The plan given; on one device all of the model; else the one that training would get."""
    if request.plan is None and meeting.world_size == 1:
        size = request.micro_batch or recipe.global_batch
        stage = Stage(layers=("all",), shares=(Share(devices=(site.device.name,), samples=size),))
        pipeline = Pipeline(samples=size, micro_batch=size, stages=(stage,))
        return request.fleet, Plan(global_batch=size, pipelines=(pipeline,))
    if request.plan is not None:
        recipe = dataclasses.replace(recipe, global_batch=request.plan.global_batch)
    fleet, plan, _ = agreed_plan(request, meeting, recipe, site, placing)
    return fleet, plan


def _predict(
    request: Request, room: Meeting, recipe: Recipe, data: Any, site: Site, fleet: Fleet, plan: Plan
) -> Predictions | None:
    used = tuple(d.name for d in fleet.devices if d.name in plan.devices)
    ranks = Ranks(used, site.device.name)
    room.rank, room.world_size = ranks.rank, ranks.world_size
    score = request.predict is not None and request.predict.score
    problem = recipe.problem
    recipe.loss_to(site.torch_device)
    keeper = Keeper(recipe.loss if score else None)
    recipe = dataclasses.replace(
        recipe,
        loss=keeper,
        dataset=data,
        global_batch=plan.global_batch,
        **({"reduction": problem.reduction, "weight": problem.weight} if score else _UNSCORED),
    )
    if ranks.world_size > 1:
        room.join_group(ranks.rank, ranks.world_size, backend_of(fleet, used))
        spread_state(recipe.model)
    steps = None
    try:
        seat = Seat(
            recipe=recipe,
            plan=plan,
            ranks=ranks,
            site=site,
            fleet=fleet,
            meeting=room,
            rehearse=request.rehearse,
            seed=request.seed,
            folder=request.run_dir,
        )
        steps = Steps(seat, lay_out(seat))
        totals = list(pass_over(steps, data, keeper.expect))
        held, why_not = mean_of(totals)
        if any(judge(part.health, on_non_finite="skip").do == "shrink" for part in totals):
            raise OutOfMemoryError(why_not, remedy="a smaller --micro-batch, or a plan with smaller ones")
        found = gathered(keeper, ranks, room)
    finally:
        if steps is not None:
            steps.close()
        room.leave_group()
    if found is None:
        return None
    outputs, left_out = found
    notes = [f"left out, as they have no dimension of samples: {', '.join(sorted(left_out))}"]
    notes = (notes if left_out else []) + ([f"no score: {why_not}"] if score and held is None else [])
    return Predictions(outputs=outputs, plan=plan, score=held if score else None, notes=tuple(notes))


_UNSCORED: dict[str, Any] = {"reduction": "sum", "weight": None, "metrics": ()}
