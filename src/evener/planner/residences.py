"""What a plan keeps on hosts, in memory or on disk, and why: sums that do not fit, and what fits instead."""

from collections.abc import Callable
from typing import NamedTuple

from msgspec.structs import replace

from evener.core.fleet import Disk
from evener.core.job import Job
from evener.core.plan import Plan, Stage
from evener.core.residence import host_room
from evener.cost.memory import stage_memory, usable_bytes
from evener.cost.model import CostModel
from evener.cost.resident_memory import home_bytes, resident_peak
from evener.cost.residing import in_words, resident
from evener.planner.groups import gib


def in_memory(plan: Plan) -> Plan:
    """`plan` with no state on disk."""
    if not any(stage.state_on_disk for _, _, stage in plan.numbered_stages()):
        return plan
    return _told(plan, lambda stage: False)


def on_hosts(model: CostModel, plan: Plan) -> Plan | None:
    """`plan` with what its stages keep on hosts where it fits: in their memory; where one's is too small for
    all of that, optimiser state on its disk, if the fleet says how fast that is. None where neither has room.

    Example: 24 GB for a host of 16: 12 GB of state go to its disk, and 12 GB and what is stepped on stay.
    """
    plan = in_memory(plan)
    held, room = _held(model, plan), {d.host: host_room(model.fleet, d.name) for d in model.fleet.devices}
    short = {host for host, kept in held.items() if kept.memory > room[host]}
    if not short:
        return plan

    def goes(stage: Stage) -> bool:
        hosts = {model.fleet.device(x.devices[0]).host for x in stage.shares}
        return bool(stage.residence and hosts & short)

    plan = _told(plan, goes)
    for host, kept in _held(model, plan).items():
        disk = _disk(model, host)
        free = disk.free_bytes.value if disk else 0.0
        if kept.memory > room[host] or kept.disk > free:
            return None
    return plan


class _Kept(NamedTuple):
    """Bytes of a host."""

    memory: float
    disk: float


def _held(model: CostModel, plan: Plan) -> dict[str, _Kept]:
    """What all stages with a residence keep, host by host."""
    held: dict[str, _Kept] = {}
    for _, _, stage in plan.numbered_stages():
        first, last = model.span(stage)
        memory = home_bytes(model.bytes, first, last, state_on_disk=stage.state_on_disk)
        state = float(model.bytes.optimizer[last] - model.bytes.optimizer[first])
        for share in stage.shares if stage.residence else ():
            host = model.fleet.device(share.devices[0]).host
            before = held.get(host, _Kept(0.0, 0.0))
            more = state if stage.state_on_disk else 0.0
            held[host] = _Kept(before.memory + memory, before.disk + more)
    return held


def _disk(model: CostModel, host: str) -> Disk | None:
    cpu = model.fleet.host_cpu(host)
    return cpu.disk if cpu else None


def _told(plan: Plan, on_disk: Callable[[Stage], bool]) -> Plan:
    pipelines = tuple(
        replace(p, stages=tuple(replace(s, state_on_disk=on_disk(s)) for s in p.stages))
        for p in plan.pipelines
    )
    return replace(plan, pipelines=pipelines)


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
            home = home_bytes(model.bytes, *span, state_on_disk=stage.state_on_disk)
            how = "its optimiser" if stage.residence == "host-optimizer" else "everything but activations"
            said.append(
                f"{name}: {', '.join(f'{k} {gib(v)}' for k, v in parts.items())} make {gib(plain.total)}, it "
                f"offers {gib(offers)}; with {how} on the host it holds {gib(so)}, and the host "
                f"{gib(home)}"
            )
            said.append(in_words(resident(model, stage, name, share.samples), stage, name))
    return tuple(said) + _why_on_disk(model, plan)


def _why_on_disk(model: CostModel, plan: Plan) -> tuple[str, ...]:
    """Sentences for each host whose memory is short, and whose disk has the state."""
    said = []
    whole = _held(model, in_memory(plan))
    for host, kept in _held(model, plan).items():
        disk, cpu = _disk(model, host), model.fleet.host_cpu(host)
        if kept.disk and disk and cpu:
            read, write = disk.read_bytes_per_s, disk.write_bytes_per_s
            said.append(
                f"{host}: its memory would hold {gib(whole[host].memory)} for its devices and has "
                f"{gib(host_room(model.fleet, _on(model, host)))}; with {gib(kept.disk)} of optimiser state "
                f"on its disk, of which {gib(disk.free_bytes.value)} are free, it holds {gib(kept.memory)}. "
                f"The disk reads {read.value / 1e9:.3g} GB/s ({read.source}, ±{read.spread:.0%}) and writes "
                f"{write.value / 1e9:.3g} ({write.source}, ±{write.spread:.0%})"
            )
    return tuple(said)


def _on(model: CostModel, host: str) -> str:
    return next(d.name for d in model.fleet.devices if d.host == host)
