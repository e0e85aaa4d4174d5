"""The end-of-run text and the plan as text; the whole texts are kept in tests/golden."""

import msgspec
import pytest

from evener.core.plan import Pipeline, Plan, Reduction, Share, Stage
from evener.report.accounting import account
from evener.report.plans import plan_text
from evener.report.steps import typical_step
from evener.report.text import report_text
from tests.unit.report.worked import EVALUATION, LEFT_OUT_REASON, OWNED, PLAN, RECORDS, SOLO, record

REPORT = account(typical_step(RECORDS, global_batch=14, warmup_steps=2), PLAN, SOLO, evaluation=EVALUATION)


def pipeline_plan():
    first = Stage(
        layers=("embed", "blocks.0"),
        shares=(Share(devices=("lab/a",), samples=3), Share(devices=("lab/b",), samples=1)),
    )
    last = Stage(layers=("head",), shares=(Share(devices=("far/c",), samples=4),))
    return Plan(
        global_batch=10,
        schedule="1f1b",
        pipelines=(Pipeline(samples=10, micro_batch=4, stages=(first, last)),),
        reductions=(
            Reduction(devices=("lab/a", "lab/b"), transport="gloo", reason="lab/a and lab/b are of one host"),
            Reduction(devices=("lab/a", "far/c"), transport="gloo", compression="bf16"),
        ),
        inexact=("BatchNorm statistics are those of each device's own samples",),
    )


def test_the_whole_report(golden):
    golden("report.txt", report_text(REPORT, PLAN))


def test_the_whole_plan(golden):
    golden("report_plan.txt", plan_text(PLAN))


def test_a_plan_with_state_in_parts(golden):
    golden("report_plan_owners.txt", plan_text(OWNED))


def test_a_plan_of_several_stages(golden):
    golden("report_plan_stages.txt", plan_text(pipeline_plan()))


def test_reasons_and_notes_are_printed_verbatim():
    noted = msgspec.structs.replace(REPORT, notes=("2 % of the actions ended late: the timings are void",))
    text = report_text(noted, PLAN)
    assert f"lab/old: {LEFT_OUT_REASON}" in text
    assert "2 % of the actions ended late: the timings are void" in text
    assert LEFT_OUT_REASON in plan_text(PLAN)
    assert PLAN.why in plan_text(PLAN)


def test_the_printed_causes_add_up_to_the_printed_gap():
    line = next(x for x in report_text(REPORT, PLAN).splitlines() if x.startswith("all, by solo rate"))
    *causes, lost = (float(x) for x in line.removeprefix("all, by solo rate").split())
    assert sum(causes) == pytest.approx(lost, abs=0.01 * len(causes))
    assert lost == pytest.approx(1000 * REPORT.gap_s, abs=0.01)


def test_every_source_of_a_number_is_told():
    text = report_text(REPORT, PLAN)
    for source in ("measured ± 1.0 %", "measured ± 2.0 %", "fitted", "(measured, fitted, assumed)"):
        assert source in text


def test_without_prediction_and_evaluation_the_report_says_so():
    plan = msgspec.structs.replace(PLAN, prediction=None, left_out=())
    solo = {name: SOLO[name] for name in plan.devices}
    report = account(typical_step(RECORDS, global_batch=14, warmup_steps=2), plan, solo)
    text = report_text(report, plan)
    assert "this plan carries no prediction" in text
    assert "held-out" not in text
    assert "Left out" not in text
    assert "no prediction: what runs was given by hand" in plan_text(plan)


def test_a_run_slower_than_its_best_device_says_so():
    slow = typical_step([record(0, 2.0)], global_batch=14, warmup_steps=0)
    assert "alone it would be faster" in report_text(account(slow, PLAN, SOLO), PLAN)
    assert "alone it would be faster" not in report_text(REPORT, PLAN)


def test_a_measured_step_outside_the_bounds_says_so():
    slow = typical_step([record(0, 2.0)], global_batch=14, warmup_steps=0)
    assert "outside 1.1 s to 1.3 s" in report_text(account(slow, PLAN, SOLO), PLAN)
    assert "inside 1.1 s to 1.3 s" in report_text(REPORT, PLAN)


def test_one_device_is_not_compared_with_itself():
    alone = msgspec.structs.replace(REPORT, devices=REPORT.devices[:1])
    assert "best single device" in report_text(REPORT, PLAN)
    assert "best single device" not in report_text(alone, PLAN)
