"""Run folders for tests: the worked example of the report's tests, written as a run writes it."""

import json
from pathlib import Path

import msgspec

from evener.core.figures import Figure
from evener.core.files import write, write_bytes
from evener.core.fleet import Device, Fleet
from evener.core.records import StepRecord
from evener.core.trace import Span, Trace
from evener.report.accounting import account
from evener.report.chrome import chrome_trace
from evener.report.page.files import RunInfo
from evener.report.steps import typical_step
from tests.unit.report.worked import EVALUATION, PLAN, RECORDS, SOLO

DEVICES = PLAN.devices
PEAKS = {name: Figure(value=1e9, source="measured", note="by torch's allocator") for name in DEVICES}


def spans(steps: int = 3, actions: int = 4) -> tuple[Span, ...]:
    """Steps of 1.2 s: compute in equal actions, a reduction of 0.1 s, the optimiser, 0.02 s of input."""
    found = []
    for step in range(steps):
        for d, device in enumerate(DEVICES):
            at = 1.2 * step
            each = (1.2 - 0.17) / actions
            for cause, action, length in (
                ("input", "INPUT", 0.02),
                *(("compute", f"{d}F{k}", each) for k in range(actions)),
                ("reduce", "REDUCE_GRAD", 0.1),
                ("optimizer", "STEP", 0.05),
            ):
                found.append(
                    Span(device=device, action=action, start_s=at, end_s=at + length, cause=cause, step=step)
                )
                at += length
    return tuple(found)


def fleet(**changes: object) -> Fleet:
    gpu = {"kind": "GPU", "type": "cuda", "memory_bytes": Figure(value=8e9, source="table")} | changes
    return Fleet(devices=tuple(Device(name=n, **gpu) for n in (*DEVICES, "lab/old")))


def run_folder(
    path: Path,
    *,
    records: tuple[StepRecord, ...] = RECORDS,
    trace: Trace | None = None,
    finished: bool = True,
    plan=PLAN,
) -> Path:
    """A run's folder at `path`, complete unless it is not `finished`."""
    path.mkdir(parents=True, exist_ok=True)
    write(path / "plan.json", plan)
    write(path / "run.json", RunInfo(name="worked", total_steps=20))
    write(path / "fleet.json", fleet())
    write_metrics(path, records)
    if finished:
        finish(path, records, trace or Trace(source="measured", spans=spans(), steps=3))
    return path


def write_metrics(path: Path, records: tuple[StepRecord, ...], mode: str = "wb") -> None:
    with (path / "metrics.jsonl").open(mode) as f:
        f.write(b"".join(msgspec.json.encode(r) + b"\n" for r in records))


def finish(path: Path, records: tuple[StepRecord, ...], trace: Trace) -> None:
    """What a run writes at its end."""
    write_bytes(path / "trace.json", chrome_trace(trace))
    typical = typical_step(records, global_batch=PLAN.global_batch, warmup_steps=3)
    report = account(typical, PLAN, SOLO, evaluation=EVALUATION)
    ending = msgspec.to_builtins(report) | {
        "decisions": ["after step 3: lab/a turned out faster"],
        "heldout_loss": EVALUATION.heldout_loss,
        "figures": EVALUATION.references,
        "peak_bytes": msgspec.to_builtins(PEAKS),
        "something of another version": 1,
    }
    (path / "report.json").write_text(json.dumps(ending), encoding="utf-8")
