"""A plan as text: who does what, what it should take, and who is left out and why."""

from evener.core.exchange import said_of
from evener.core.ownership import WORDS, held_by, shares_of_state
from evener.core.plan import Pipeline, Plan, Reduction, Stage, TablePlacement
from evener.core.words import counted
from evener.report.tables import duration, percent, render, size, table


def plan_text(plan: Plan) -> str:
    """`plan` as text for a person; reasons and sentences of the plan appear verbatim."""
    samples = plan.samples_by_device()
    parts = [
        f"Plan: {counted(plan.global_batch, 'sample')} a step on {counted(len(plan.devices), 'device')}, "
        f"{plan.schedule}"
    ]
    parts += [plan.why] if plan.why else []
    parts += _prediction(plan)
    header, rows = _rows(plan, samples)
    sections = [render(*parts), render(table(header, rows, left=3 if "stage" in header else 1))]
    if plan.owners:
        sections.append(render("State", *state_lines(plan)))
    if plan.reductions:
        lines = [reduction_line(number, x) for number, x in enumerate(plan.reductions, start=1)]
        sections.append(render("Gradients are summed", *lines))
    if plan.tables:
        sections.append(render("Tables", *(table_line(x) for x in plan.tables)))
    if plan.left_out:
        sections.append(render("Left out", *(f"  {x.device}: {x.reason}" for x in plan.left_out)))
    if plan.inexact:
        sections.append(render("Not exact", *(f"  {sentence}" for sentence in plan.inexact)))
    return "\n".join(sections)


def _prediction(plan: Plan) -> list[str]:
    told = plan.prediction
    if told is None:
        return ["no prediction: what runs was given by hand, in whole or in part, and not priced"]
    return [
        f"predicted step: {duration(told.step_s)} ({told.source}; between {duration(told.lower_s)} and "
        f"{duration(told.upper_s)}), {plan.global_batch / told.step_s:.4g} samples/s"
    ]


def _rows(plan: Plan, samples: dict[str, int]) -> tuple[list[str], list[list[str]]]:
    """One row for each device of each stage; the columns that the plan has nothing for are left out."""
    solo = plan.prediction.solo_samples_per_s if plan.prediction else {}
    memory = plan.prediction.memory_bytes if plan.prediction else {}
    staged = any(len(p.stages) > 1 for p in plan.pipelines)
    header = ["device", *(["stage", "layers"] if staged else []), "samples", "part", "micro-batches"]
    header += (["alone, samples/s"] if solo else []) + (["memory"] if memory else [])
    rows = []
    for number, which, stage in plan.numbered_stages():
        pipeline = plan.pipelines[which]
        for share in stage.shares:
            for name in share.devices:
                row = [name, *([str(number), _span_of(stage)] if staged else [])]
                row += [str(samples[name]), percent(samples[name] / plan.global_batch)]
                row += [_micro_batches(pipeline, share.samples)]
                row += [f"{solo[name]:.4g}" if name in solo else "unknown"] if solo else []
                row += [size(memory[name]) if name in memory else "unknown"] if memory else []
                rows.append(row)
    return header, rows


def _span_of(stage: Stage) -> str:
    """First and last layer of a stage. Example: "embed .. blocks.3"."""
    return stage.layers[0] if len(stage.layers) == 1 else f"{stage.layers[0]} .. {stage.layers[-1]}"


def _micro_batches(pipeline: Pipeline, samples: int) -> str:
    """Sizes of the micro-batches in words. Examples: "2 x 4 + 2"; "2 x 4 (3 of 4)" in a shared stage."""
    full, rest = divmod(pipeline.samples, pipeline.micro_batch)
    sizes = [f"{full} x {pipeline.micro_batch}"] if full else []
    sizes += [str(rest)] if rest else []
    shared = "" if samples == pipeline.micro_batch or not sizes else f" ({samples} of {pipeline.micro_batch})"
    return (" + ".join(sizes) or "none") + shared


def state_lines(plan: Plan) -> list[str]:
    """What is kept in unequal parts, and how much of it each device keeps.

    Example: "  the optimiser's state in parts; the rest whole on every device", "  a/0 62.5 %, 1.2 GiB".
    """
    held = held_by(plan)
    if held is None:
        return []
    where = "every device" if plan.is_data_parallel else "every device that holds a layer"
    rest = "" if held == "parameters" else f"; the rest whole on {where}"
    kept = plan.prediction.owned_bytes if plan.prediction else {}
    return [f"  {WORDS[held]} in parts{rest}"] + [
        f"  {name} {percent(part)}" + (f", {size(kept[name])}" if name in kept else "")
        for name, part in shares_of_state(plan).items()
    ]


def reduction_line(number: int, reduction: Reduction) -> str:
    """Who sums together, over what, and why. Example: "  1. a/0, a/1 over nccl: alike on a"."""
    compression = said_of(reduction.compression)
    reason = f": {reduction.reason}" if reduction.reason else ""
    return f"  {number}. {', '.join(reduction.devices)} over {reduction.transport}{compression}{reason}"


def table_line(placed: TablePlacement) -> str:
    """Where a table's rows are, and why. Example: "  emb, cpu: a/0 5 rows (40 B), a/1 3 rows (24 B)"."""
    held = {d: f" ({size(num_bytes)})" for d, num_bytes in placed.held_bytes.items()}
    parts = [f"{d} {counted(n, 'row')}{held.get(d, '')}" for d, n in placed.rows.items()]
    rows = "on every device" if placed.residence == "dense" else ", ".join(parts)
    why = f"; {placed.why}" if placed.why else ""
    return f"  {placed.table}, {placed.residence or 'cpu'}: {rows}{why}"
