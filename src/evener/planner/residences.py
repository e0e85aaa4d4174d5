"""Why a plan keeps parameters or state on the host: the sum that does not fit, and what fits instead."""

from evener.core.job import Job
from evener.core.plan import Plan
from evener.core.residence import host_room
from evener.cost.memory import stage_memory, usable_bytes
from evener.cost.model import CostModel
from evener.cost.resident_memory import home_bytes, resident_peak
from evener.cost.residing import in_words, resident
from evener.planner.groups import gib


def fits_hosts(model: CostModel, plan: Plan) -> bool:
    """Whether what all stages of a plan keep on their hosts fits there, host by host."""
    held: dict[str, float] = {}
    room: dict[str, float] = {}
    for _, _, stage in plan.numbered_stages():
        for share in stage.shares if stage.residence else ():
            host = model.fleet.device(share.devices[0]).host
            held[host] = held.get(host, 0.0) + home_bytes(model.bytes, *model.span(stage))
            room[host] = host_room(model.fleet, share.devices[0])
    return all(held[host] <= room[host] for host in held)


def why_resident(model: CostModel, plan: Plan, job: Job) -> tuple[str, ...]:
    """Sentences for each device of a stage with a residence: what it would hold, offers, and holds so.

    Example: "lab/gpu0: parameters 2 GiB, gradients 2 GiB, optimiser state 4 GiB and activations 1 GiB make 9
    GiB, it offers 6 GiB; with everything but activations on the host it holds 3 GiB".
    """
    said = []
    for _, which, stage in plan.numbered_stages():
        pipeline = plan.pipelines[which]
        place = pipeline.stages.index(stage)
        in_flight = min(len(pipeline.stages) - place, len(pipeline.micro_batch_sizes))
        for share in stage.shares if stage.residence else ():
            name, span = share.devices[0], model.span(stage)
            plain = stage_memory(model.bytes, *span, samples=share.samples, in_flight=in_flight)
            parts = {
                "parameters": plain.parameters,
                "gradients": plain.gradients,
                "optimiser state": plain.optimizer,
                "activations and the rest": plain.total
                - plain.parameters
                - plain.gradients
                - plain.optimizer,
            }
            so = resident_peak(
                model.bytes,
                list(model.places),
                span,
                share.samples,
                in_flight,
                str(stage.residence),
                recompute=stage.recompute,
            )
            offers = usable_bytes(model.fleet.device(name), job.memory_margin)
            how = "its optimiser" if stage.residence == "host-optimizer" else "everything but activations"
            said.append(
                f"{name}: {', '.join(f'{k} {gib(v)}' for k, v in parts.items())} make {gib(plain.total)}, it "
                f"offers {gib(offers)}; with {how} on the host it holds {gib(so)}, and the host "
                f"{gib(home_bytes(model.bytes, *span))}"
            )
            said.append(in_words(resident(model, stage, name, share.samples), stage, name))
    return tuple(said)
