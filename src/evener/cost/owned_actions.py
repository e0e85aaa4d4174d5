"""The numbers that a schedule is played with where owners keep state in parts."""

from collections.abc import Mapping

from evener.core.plan import Plan
from evener.cost.model import CostModel
from evener.cost.owned import play_owned
from evener.cost.owned_memory import owners_of
from evener.schedules.costs import Costs, Memory, Reduction


def owned_costs(model: CostModel, plan: Plan, limits: Mapping[str, float | None]) -> Costs:
    """The seconds and bytes of `plan`, as `play_owned` finds them; `limits` are usable bytes by device.

    A forward or backward waits for parameters first, the first forward so for the slowest owner's step; the
    last gradients go to their owners behind the last backward.
    """
    told = play_owned(model, plan)
    owners = owners_of(model.profile, model.bytes, plan)
    compute: dict[tuple[int, str, str, int], float] = {}
    gathers: dict[tuple[int, str, str, int], float] = {}
    reads: dict[tuple[int, str, int], float] = {}
    memory = {}
    for stage, (name, pipeline) in enumerate(zip(plan.devices, plan.pipelines, strict=True)):
        sizes = pipeline.micro_batch_sizes
        kind = model.fleet.device(name).kind
        step = model.step(kind)
        for size in set(sizes):
            forward, backward = (float(x.sum()) for x in model.layers(kind).seconds(size))
            compute |= {(stage, name, "F", size): forward, (stage, name, "B", size): backward}
            reads[stage, name, size] = float(step.input_s[min(size, step.largest)]) if step else 0.0
        for m, (before_forward, before_backward) in enumerate(told.gather_s[name]):
            gathers[stage, name, "F", m] = before_forward
            gathers[stage, name, "B", m] = before_backward
        largest = max(sizes, default=0)
        held = owners.memory(name, largest)
        memory[name] = Memory(
            limit_bytes=limits.get(name),
            fixed_bytes=held.total - held.activations,
            saved_bytes={stage: held.activations / largest} if largest else {},
        )
    holders = tuple((stage, name) for stage, name in enumerate(plan.devices))
    ready = tuple(1.0 for _ in holders)
    layers = tuple(x.name for x in model.profile.layers)
    behind = Reduction(layers=layers, holders=holders, pieces=((told.summed_s - told.compute_end_s, ready),))
    return Costs(
        compute_s=compute,
        input_s=reads,
        gather_s=gathers,
        reductions=(behind,) if len(holders) > 1 else (),
        update_s={name: causes["optimizer"] for name, causes in told.seconds.items()},
        overhead_s={name: causes["overhead"] for name, causes in told.seconds.items()},
        memory=memory,
    )
