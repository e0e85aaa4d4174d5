"""The plan as a picture: pipelines as rows, stages as boxes as wide as their work, and memory by device."""

from collections.abc import Mapping, Sequence

from evener.core.figures import Figure
from evener.core.fleet import Device, Fleet
from evener.core.ownership import WORDS, held_by, shares_of_state
from evener.core.plan import Pipeline, Plan, Stage, share_samples
from evener.core.words import counted
from evener.report.page.cells import columns, memory, number, part, short, word
from evener.report.page.document import Cell, Holder, Memory, PipelineRow, PlanPicture, StageBox, Table
from evener.report.page.files import RunFiles
from evener.report.tables import size


def plan_picture(run: RunFiles) -> PlanPicture:
    """The picture of a run's plan, with kinds and memory where the fleet file tells them."""
    plan = run.plan
    layers = {x.name: x for x in run.profile.layers} if run.profile else {}
    known = bool(layers) and all(name in layers for s in plan.pipelines[0].stages for name in s.layers)
    work = {name: x.flops_per_sample for name, x in layers.items()} if known else {}
    if not any(work.values()):
        work = {}
    left_out = tuple(x.device for x in plan.left_out)
    shown = tuple(_memory(name, run) for name in plan.devices)
    params = {name: x.param_bytes for name, x in layers.items()} if known else {}
    held = held_by(plan)
    state = f", {WORDS[held]} in unequal parts" if held else ""
    return PlanPicture(
        headline=f"{counted(plan.global_batch, 'sample')} a step on {counted(len(plan.devices), 'device')}, "
        f"schedule {plan.schedule}{state}",
        why=short(plan.why),
        devices=(*plan.devices, *left_out),
        pipelines=_rows(plan, work, params),
        memory=shown,
        table=_table(plan, run.fleet, shown),
        weight_unit="FLOPs of its layers (profile.json)" if work else "number of its layers",
    )


def _rows(plan: Plan, work: Mapping[str, float], params: Mapping[str, int]) -> tuple[PipelineRow, ...]:
    rows: list[list[StageBox]] = [[] for _ in plan.pipelines]
    for number_, which, stage in plan.numbered_stages():
        rows[which].append(_box(number_, stage, work, params))
    return tuple(
        PipelineRow(
            samples=p.samples,
            part=p.samples / plan.global_batch,
            micro_batches=_micro_batches(p),
            stages=tuple(boxes),
        )
        for p, boxes in zip(plan.pipelines, rows, strict=True)
    )


def _micro_batches(pipeline: Pipeline) -> str:
    """Example: "2 × 4 + 2"."""
    full, rest = divmod(pipeline.samples, pipeline.micro_batch)
    sizes = [*([f"{full} × {pipeline.micro_batch}"] if full else []), *([str(rest)] if rest else [])]
    return " + ".join(sizes) or "none"


def _box(number_: int, stage: Stage, work: Mapping[str, float], params: Mapping[str, int]) -> StageBox:
    names = stage.layers
    facts = [counted(len(names), "layer")]
    if params:
        facts.append(f"{size(sum(params[n] for n in names))} of parameters")
    facts += [stage.precision] if stage.precision else []
    facts += ["recomputed"] if stage.recompute else []
    facts += [f"kept on {stage.residence}"] if stage.residence else []
    facts += ["optimiser state on disk"] if stage.state_on_disk else []
    return StageBox(
        number=number_,
        title=short(names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}", 120),
        layers=tuple(short(n, 200) for n in names),
        weight=sum(work[n] for n in names) if work else float(len(names)),
        facts=tuple(facts),
        holders=tuple(Holder(devices=s.devices, samples=s.samples) for s in stage.shares),
    )


def _memory(name: str, run: RunFiles) -> Memory:
    told = run.plan.prediction
    peak = (run.ending.peak_bytes or {}).get(name) if run.ending else None
    device = _device(run.fleet, name)
    limit = (device.free_memory_bytes or device.memory_bytes) if device else None
    predicted = told.memory_bytes.get(name) if told else None
    return Memory(
        device=name,
        predicted=predicted,
        predicted_source=told.source if told and predicted is not None else "",
        measured=peak.value if peak else None,
        measured_source=_sourced(peak),
        limit=limit.value if limit else None,
        limit_source=_sourced(limit),
    )


def _sourced(figure: Figure | None) -> str:
    return "" if figure is None else f"{figure.source}{f', {figure.note}' if figure.note else ''}"


def _device(fleet: Fleet | None, name: str) -> Device | None:
    return next((d for d in fleet.devices if d.name == name), None) if fleet else None


def _table(plan: Plan, fleet: Fleet | None, shown: Sequence[Memory]) -> Table:
    samples = plan.samples_by_device()
    solo = plan.prediction.solo_samples_per_s if plan.prediction else {}
    source = plan.prediction.source if plan.prediction else ""
    held = {x.device: x for x in shown}
    parts = shares_of_state(plan)
    kept = plan.prediction.owned_bytes if plan.prediction else {}
    rows: list[tuple[Cell, ...]] = []
    for name in (*plan.devices, *(x.device for x in plan.left_out)):
        device, bytes_ = _device(fleet, name), held.get(name)
        rows.append(
            (
                word(name),
                word(device.kind if device else "–"),
                word(_stages(plan, name)),
                number(samples.get(name, 0), "d"),
                part(samples.get(name, 0) / plan.global_batch),
                number(solo.get(name)),
                *((part(parts.get(name, 0.0)), memory(kept.get(name))) if parts else ()),
                memory(bytes_.predicted if bytes_ else None),
                memory(bytes_.measured if bytes_ else None),
                memory(bytes_.limit if bytes_ else None),
            )
        )
    header = columns(
        "device",
        "kind",
        "stages",
        ("samples", "a step"),
        ("part", "of the batch"),
        ("alone", f"samples/s{f', {source}' if source else ''}"),
        *((("state", "of what is in parts"), ("kept", "in parts")) if parts else ()),
        ("memory", f"predicted{f', {source}' if source else ''}"),
        ("used", "measured"),
        ("there", "fleet file"),
    )
    return Table(caption="What each device holds and takes", columns=header, rows=tuple(rows))


def _stages(plan: Plan, device: str) -> str:
    """Example: "1 (4 of 8)": stage 1, 4 of the 8 samples of its micro-batches."""
    said = []
    for number_, which, stage in plan.numbered_stages():
        pipeline = plan.pipelines[which]
        for share, _ in zip(stage.shares, share_samples(stage, pipeline), strict=True):
            if device in share.devices:
                whole = share.samples == pipeline.micro_batch
                said.append(
                    str(number_) if whole else f"{number_} ({share.samples} of {pipeline.micro_batch})"
                )
    return ", ".join(said) or "left out"
