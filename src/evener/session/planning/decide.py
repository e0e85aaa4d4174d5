"""The one place where a run asks the planner: what was asked and measured becomes a plan, or a no."""

from evener import planner
from evener.core.fewer import Fewer, fewer_in
from evener.core.fleet import Fleet
from evener.core.job import Job
from evener.core.order import global_batch_at
from evener.core.plan import Plan
from evener.core.profile import Profile
from evener.core.split import apportion
from evener.core.words import counted
from evener.errors import DataError, PlanMismatchError, UsageError
from evener.planner.links import UNLINKED
from evener.policy.shares import for_stealing
from evener.session.layout.tables import table_names
from evener.session.loop.stealing import check_stealing
from evener.session.planning.inexact import with_inexact
from evener.session.recipe import Recipe
from evener.session.request import Request


def other_batch(request: Request, own: int) -> tuple[str, ...]:
    """A sentence where samples by device sum to another global batch than the recipe's `own`.

    Example: 50, 25, 13 and 13 where the recipe has 100 are 101 samples a step.
    """
    if not request.batch_per_device or request.global_batch in (None, own):
        return ()
    return (
        f"the global batch is {request.global_batch}, as --batch-per-device sums to, not the recipe's {own}",
    )


def choose_plan(request: Request, fleet: Fleet, recipe: Recipe, profile: Profile) -> Plan:
    """The planner's plan for this run, with everything that is not exact named in it.

    DataError where the dataset cannot fill one global batch.
    """
    check_dataset(recipe)
    given = request.batch_per_device
    if request.even:
        names = [d.name for d in fleet.devices]
        given = dict(zip(names, apportion(recipe.global_batch, [1.0] * len(names)), strict=True))
    job = Job(
        global_batch=recipe.global_batch,
        micro_batch=request.micro_batch,
        batch_per_device=given,
        keep_all=request.keep_all,
        sums=request.sums,
        state=request.state,
        compress=request.compress or tuple(recipe.compress),
        fewer=fewer_of(request, recipe),
        allow=(UNLINKED,),  # devices of one host are used without probing what lies between them
    )
    plan = planner.plan(fleet, profile, job, shapes=request.shapes).plan
    if steals(request, recipe):
        check_stealing(plan, recipe.model, table_names(recipe))
        plan = for_stealing(plan, fleet, profile, job)
    return with_inexact(plan, recipe, profile)


def fewer_of(request: Request, recipe: Recipe) -> tuple[Fewer, ...]:
    """How hosts may exchange less often than once a step. UsageError for a way that does not exist."""
    return fewer_in(request.fewer or tuple(recipe.fewer))


def steals(request: Request, recipe: Recipe) -> bool:
    """Whether the user wants devices to take each other's micro-batches."""
    return request.steal or recipe.steal


def check_dataset(recipe: Recipe) -> None:
    """Raise DataError unless the dataset fills one global batch: no step would be what was planned.

    Example: 5 samples and a global batch of 8 are refused; 8 and 8 are one step an epoch.
    """
    size = len(recipe.dataset)
    if size < recipe.global_batch:
        raise DataError(
            "the dataset is smaller than one global batch",
            numbers=f"{counted(size, 'sample')}, global batch {recipe.global_batch}",
            remedy=f"--batch {size} or less (global_batch in the recipe), or more samples",
        )


def check_micro_batch(request: Request, recipe: Recipe) -> None:
    """Raise UsageError where more samples at once are asked for than a step has.

    Example: --micro-batch 99999 and a global batch of 256: before it measures with that many samples.
    """
    at_once = request.micro_batch
    if at_once is not None and at_once > recipe.global_batch and not request.predict:
        raise UsageError(
            "a micro-batch cannot have more samples than a step",
            numbers=f"--micro-batch {at_once}, global batch {recipe.global_batch}",
            remedy=f"--micro-batch {recipe.global_batch} or less, or leave it out: the planner chooses",
        )


def check_plan(plan: Plan, fleet: Fleet, recipe: Recipe) -> None:
    """Raise PlanMismatchError unless `plan` can run this recipe on this fleet; DataError: too few samples."""
    here = [d.name for d in fleet.devices]
    missing = [name for name in plan.devices if name not in here]
    if missing:
        raise PlanMismatchError(
            f"the plan uses {', '.join(missing)}, which this job does not have",
            numbers=f"devices here: {', '.join(here)}",
            remedy="evener plan for these devices, or the plan's own fleet",
        )
    teams = [x.devices for p in plan.pipelines for t in p.stages for x in t.shares if len(x.devices) > 1]
    if teams:
        raise PlanMismatchError(
            "the plan has tensor-parallel groups, which are priced but cannot be run yet",
            numbers=f"a share of {', '.join(teams[0])}",
            remedy="one device a share; without --allow tensor-parallel the planner makes such plans",
        )
    at_once = (plan.fewer.every or 1) if plan.fewer and plan.fewer.how == "accumulate" else 1
    if plan.global_batch != recipe.global_batch * at_once:
        raise PlanMismatchError(
            f"the plan is for a global batch of {plan.global_batch}, the recipe asks for "
            f"{recipe.global_batch}" + (f" x {at_once}" if at_once > 1 else ""),
            remedy="--batch with the plan's number, or a new plan",
        )
    check_dataset(recipe)


def samples_to_train(request: Request, dataset_size: int, global_batch: int) -> int:
    """Samples after which the run ends: so many steps, so many epochs, or one epoch.

    Example: 3 steps of 4 over 10 samples end after 10: the third batch holds the epoch's last 2.
    """
    if request.steps is None:
        return max(1, round((1 if request.epochs is None else request.epochs) * dataset_size))
    whole = -(-dataset_size // global_batch)  # steps of an epoch
    seen = request.steps // whole * dataset_size
    for _ in range(request.steps % whole):
        seen += global_batch_at(seen, dataset_size, global_batch).samples
    return seen
