"""Running a request: in processes of our own, or as one of the processes that torchrun started."""

from evener.session.conclude import Outcome
from evener.session.launch import launch
from evener.session.meeting import is_launched, open_meeting
from evener.session.recipe import Recipe
from evener.session.request import Request
from evener.session.worker import guarded_work


def run(request: Request) -> Outcome | None:
    """The outcome of `request`; None on the processes of a torchrun job that do not lead."""
    if is_launched():
        return guarded_work(request, open_meeting())
    return launch(request)


def run_here(request: Request, recipe: Recipe) -> Outcome | None:
    """Run with a recipe object, in this process alone or as one of torchrun's."""
    return guarded_work(request, open_meeting(), recipe)
