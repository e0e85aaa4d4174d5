"""A small run with round numbers that the tests of the report share: 8:4:2 samples/s, one device left out."""

from msgspec.structs import replace

from evener.core.figures import Figure
from evener.core.plan import LeftOut, Ownership, Pipeline, Plan, Prediction, Share, Stage
from evener.core.records import StepRecord
from evener.report.results import Evaluation, Solo

LEFT_OUT_REASON = "lab/old alone needs 4.0 s a sample: with it the step would take 4.0 s instead of 1.2 s"


def pipeline(device, samples, micro_batch):
    stage = Stage(layers=("embed", "head"), shares=(Share(devices=(device,), samples=micro_batch),))
    return Pipeline(samples=samples, micro_batch=micro_batch, stages=(stage,))


PLAN = Plan(
    global_batch=14,
    pipelines=(pipeline("lab/a", 8, 4), pipeline("lab/b", 4, 4), pipeline("far/c", 2, 2)),
    left_out=(LeftOut(device="lab/old", reason=LEFT_OUT_REASON),),
    prediction=Prediction(
        step_s=1.15,
        lower_s=1.1,
        upper_s=1.3,
        memory_bytes={"lab/a": 2_000_000_000, "lab/b": 1_500_000_000, "far/c": 900_000_000},
        solo_samples_per_s={"lab/a": 8.0, "lab/b": 4.0, "far/c": 2.0, "lab/old": 0.25},
        seconds={
            "lab/a": {"compute": 1.0, "optimizer": 0.05, "reduce": 0.1},
            "lab/b": {"compute": 1.02, "wait": 0.03, "optimizer": 0.05, "reduce": 0.05},
        },
    ),
    why="each device gets samples in proportion to its rate; the slowest share takes 1.05 s",
)
OWNED = replace(
    PLAN,
    pipelines=(pipeline("lab/a", 10, 4), pipeline("lab/b", 4, 4), pipeline("far/c", 0, 1)),
    owners=tuple(
        Ownership(layer=n, parts={"lab/a": 5, "lab/b": 3, "far/c": 2}, held="gradients")
        for n in ("embed", "head")
    ),
    prediction=replace(
        PLAN.prediction,
        owned_bytes={"lab/a": 600_000_000, "lab/b": 360_000_000, "far/c": 240_000_000},
    ),
)
"""The same devices with state in parts; the far one keeps its part and takes no samples."""
SOLO = {
    "lab/a": Solo(
        samples_per_s=Figure(value=8.0, source="measured", spread=0.01), seconds={"optimizer": 0.005}
    ),
    "lab/b": Solo(
        samples_per_s=Figure(value=4.0, source="measured", spread=0.02), seconds={"optimizer": 0.01}
    ),
    "far/c": Solo(samples_per_s=Figure(value=2.0, source="fitted"), seconds={"optimizer": 0.02}),
    "lab/old": Solo(samples_per_s=Figure(value=0.25, source="assumed")),
}
SECONDS = {
    "lab/a": {"compute": 1.0, "optimizer": 0.05, "reduce": 0.1, "wait": 0.04},
    "lab/b": {"compute": 1.05, "optimizer": 0.05, "reduce": 0.05, "input": 0.03},
    "far/c": {"compute": 1.1, "optimizer": 0.06},
}
EVALUATION = Evaluation(
    heldout_loss=2.5, unit="nats per byte", references={"unigram entropy": 3.26, "bigram entropy": 2.44}
)


def record(step, step_s=1.2, **changes):
    given = {"samples": 14, "loss": 5.5 - 0.1 * step, "lr": 1e-3, "seconds": SECONDS} | changes
    return StepRecord(step=step, step_s=step_s, **given)


RECORDS = tuple(record(step, 9.0 if step < 2 else 1.2) for step in range(10))
