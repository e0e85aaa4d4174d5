"""Outputs for a dataset, in its order, through any plan: what `model(x)` in evaluation mode would give."""

import tempfile
from pathlib import Path
from typing import Any

from evener.core.fleet import Fleet
from evener.core.plan import Plan
from evener.core.profile import Profile
from evener.session.ask import fleet_here
from evener.session.launched import is_launched, world_size_here
from evener.session.launching.launch import launch_for
from evener.session.meeting import open_meeting
from evener.session.prediction.process import Predicted, Predictions, predict_to_file, predict_with
from evener.session.recipe import Recipe, check_recipe
from evener.session.request import Prediction, Request
from evener.session.worker import telling


def predict(
    recipe: Recipe,
    dataset: Any = None,
    *,
    plan: Plan | None = None,
    fleet: Fleet | None = None,
    profile: Profile | None = None,
    weights: str | Path | None = None,
    score: bool = False,
    rehearse: bool = False,
    seed: int = 0,
) -> Predictions | None:
    """`recipe.model`'s outputs for `dataset` (the recipe's own without one); call it in every process.

    The order is the dataset's, whatever the plan, and the model in evaluation mode. `weights` are read first:
    a safetensors file or a run's folder. With `score` also the recipe's loss and metrics. Returns them on the
    leading process, None on the others. Example: ev.predict(recipe, test).outputs["output"].argmax(1).
    """
    check_recipe(recipe)
    fleet = fleet or fleet_here(None, world_size_here() or 1)
    with tempfile.TemporaryDirectory(prefix="evener-predict-") as folder:
        request = Request(
            fleet=fleet,
            run_dir=folder,
            rehearse=rehearse,
            plan=plan,
            profile=profile,
            weights=str(weights) if weights else None,
            seed=seed,
            predict=Prediction(data="dataset", score=score),
        )
        meeting = open_meeting()
        with telling(meeting, fleet.devices[meeting.rank].name):
            return predict_with(request, meeting, recipe, dataset)


def run_prediction(request: Request) -> Predicted | None:
    """What `request.predict` asks for, in processes of our own or as one of torchrun's."""
    if is_launched():
        return predict_to_file(request, open_meeting())
    return launch_for(request, Predicted)
