"""Plans of different shapes for the deep text model, with what each should take."""

from itertools import pairwise, permutations

from msgspec.structs import replace

from evener import schedules, sim
from evener.core.fleet import Fleet
from evener.core.plan import Pipeline, Plan, Prediction, Share, Stage
from evener.core.profile import Profile
from evener.cost.evaluate import CostModel, evaluate
from evener.cost.worth import unbounded_samples_per_s, useful_samples

MICRO_BATCHES = (1, 2, 4)


def pipeline(
    profile: Profile,
    samples: int,
    micro_batch: int,
    cuts: tuple[int, ...],
    devices: tuple[dict[str, int] | str, ...],
) -> Pipeline:
    """A pipeline cut before the layers numbered `cuts`; a stage has one device, or several with samples."""
    names = [layer.name for layer in profile.layers]
    stages = []
    for (first, end), held in zip(pairwise((0, *cuts, len(names))), devices, strict=True):
        shares = {held: micro_batch} if isinstance(held, str) else held
        stages.append(
            Stage(
                layers=tuple(names[first:end]),
                shares=tuple(Share(devices=(name,), samples=n) for name, n in shares.items()),
            )
        )
    return Pipeline(samples=samples, micro_batch=micro_batch, stages=tuple(stages))


def plan_of(*pipelines: Pipeline) -> Plan:
    """The pipelines as a plan that runs under 1F1B."""
    return Plan(global_batch=sum(p.samples for p in pipelines), pipelines=tuple(pipelines), schedule="1f1b")


def even_plan(profile: Profile, fleet: Fleet, batch: int, micro_batch: int) -> Plan:
    """As many blocks on each device, in the order of the fleet; the first and last also have the ends."""
    blocks = [i for i, layer in enumerate(profile.layers) if layer.name.startswith("blocks.")]
    depth = len(blocks) // len(fleet.devices)
    cuts = tuple(blocks[depth * k] for k in range(1, len(fleet.devices)))
    return plan_of(pipeline(profile, batch, micro_batch, cuts, tuple(d.name for d in fleet.devices)))


def priced(fleet: Fleet, profile: Profile, plan: Plan) -> Plan:
    """`plan` with the simulator's prediction, and what its report needs."""
    model = CostModel(fleet=fleet, profile=profile)
    costs = sim.plan_costs(model, plan)
    step_s = sim.simulate(schedules.make(plan, costs=costs), plan, costs).step_s
    told = Prediction(
        step_s=step_s,
        lower_s=step_s,
        upper_s=step_s,
        unbounded_samples_per_s={
            name: unbounded_samples_per_s(model, fleet.device(name).kind, plan.global_batch)
            for name in plan.devices
        },
        useful_samples={} if plan.is_data_parallel else useful_samples(model, plan),
    )
    return replace(plan, prediction=told)


def best_pipeline(fleet: Fleet, profile: Profile, batch: int) -> Plan:
    """The fastest single pipeline over all devices, of all orders and cuts; memory does not limit it."""
    model = CostModel(fleet=fleet, profile=profile)
    count, names = len(profile.layers), tuple(d.name for d in fleet.devices)
    kinds = {d.name: d.kind for d in fleet.devices}
    orders = {tuple(kinds[n] for n in order): order for order in permutations(names)}
    plans = [
        plan_of(pipeline(profile, batch, size, cuts, order))
        for order in orders.values()
        for cuts in _cuts(count, len(names))
        for size in MICRO_BATCHES
    ]
    return min(plans, key=lambda p: evaluate(model, p).step_s)


def _cuts(count: int, parts: int) -> list[tuple[int, ...]]:
    if parts == 1:
        return [()]
    return [(*before, cut) for cut in range(parts - 1, count) for before in _cuts(cut, parts - 1)]


def shapes(fleet: Fleet, profile: Profile, batch: int) -> dict[str, Plan]:
    """One plan of each shape on the devices a, b, c and d at about 8, 4, 2 and 2."""
    a, b, c, d = (device.name for device in fleet.devices)
    blocks = next(i for i, layer in enumerate(profile.layers) if layer.name.startswith("blocks."))

    def make(samples: int, size: int, cuts: tuple[int, ...], *devices: dict[str, int] | str) -> Pipeline:
        return pipeline(profile, samples, size, tuple(blocks + k for k in cuts), devices)

    return {
        "data parallel": plan_of(
            make(batch // 2, 2, (), a),
            make(batch // 4, 2, (), b),
            make(batch // 8, 1, (), c),
            make(batch // 8, 1, (), d),
        ),
        "two stages": plan_of(make(batch, 2, (11,), a, b)),
        "four stages": plan_of(make(batch, 1, (2, 10, 14), c, a, b, d)),
        "hybrid": plan_of(make(batch - 4, 1, (11,), a, b), make(4, 1, (8,), c, d)),
        "shared stage": plan_of(make(batch, 4, (10,), a, {b: 2, c: 1, d: 1})),
        "a device twice": plan_of(make(batch, 2, (5, 11), a, b, a)),
        "uneven micro-batches": plan_of(make(batch, 3, (11,), a, b)),
    }
