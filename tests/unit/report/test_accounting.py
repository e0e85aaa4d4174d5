"""Efficiency and lost time on worked numbers; the property test is in tests/properties."""

import json

import msgspec
import pytest

from evener.core.figures import Figure
from evener.core.plan import Pipeline, Plan, Prediction, Share, Stage
from evener.errors import PlanMismatchError, UnknownNameError, UsageError
from evener.report.accounting import account, lost_by_cause, predicted_solo
from evener.report.results import LOSS_CAUSES, Solo
from evener.report.steps import typical_step
from tests.unit.report.worked import EVALUATION, LEFT_OUT_REASON, PLAN, RECORDS, SECONDS, SOLO, pipeline

TYPICAL = typical_step(RECORDS, global_batch=14, warmup_steps=2)
REPORT = account(TYPICAL, PLAN, SOLO, evaluation=EVALUATION)
BY_NAME = {d.name: d for d in REPORT.devices}


def test_rates_and_efficiency():
    assert REPORT.samples_per_s == pytest.approx(14 / 1.2)
    assert REPORT.ideal_samples_per_s == pytest.approx(14.25)
    assert REPORT.efficiency == pytest.approx(14 / 1.2 / 14.25)
    assert REPORT.efficiency_used == pytest.approx(14 / 1.2 / 14)
    assert REPORT.ideal_step_s == pytest.approx(14 / 14.25)
    assert REPORT.gap_s == pytest.approx(1.2 * (1 - REPORT.efficiency))


def test_the_lost_seconds_of_a_device():
    """lab/a: 8 samples at 8/s are 1 s alone, 0.96 of compute and 0.04 of optimizer; the step takes 1.2 s."""
    lost = BY_NAME["lab/a"].lost_s
    assert lost["compute"] == pytest.approx(0.04)
    assert lost["optimizer"] == pytest.approx(0.01)
    assert lost["reduce"] == pytest.approx(0.1)
    assert lost["wait"] == pytest.approx(0.04)
    assert lost["overhead"] == pytest.approx(0.01)
    assert sum(lost.values()) == pytest.approx(0.2)
    assert BY_NAME["lab/a"].busy == pytest.approx(1.05 / 1.2)


def test_the_lost_seconds_of_all():
    assert tuple(REPORT.lost_s) == LOSS_CAUSES
    assert REPORT.lost_s["left_out"] == pytest.approx(1.2 * 0.25 / 14.25)
    assert REPORT.lost_s["reduce"] == pytest.approx((8 * 0.1 + 4 * 0.05) / 14.25)
    assert sum(REPORT.lost_s.values()) == pytest.approx(REPORT.gap_s, abs=1e-12)


def test_a_left_out_device_loses_the_whole_step_and_keeps_its_reason():
    old = BY_NAME["lab/old"]
    assert (old.samples_per_step, old.busy, old.seconds) == (0, 0.0, {})
    assert old.lost_s["left_out"] == pytest.approx(1.2)
    assert old.left_out == LEFT_OUT_REASON


def test_the_example_of_the_docstring():
    solo = Solo(samples_per_s=Figure(value=8, source="measured"), seconds={"optimizer": 0.005})
    lost = lost_by_cause(8, {"compute": 1.0, "optimizer": 0.05, "wait": 0.2}, solo)
    assert lost["compute"] == pytest.approx(0.04)
    assert lost["optimizer"] == pytest.approx(0.01)
    assert sum(lost.values()) == pytest.approx(0.25)


def test_the_json_names_are_the_fixed_ones():
    told = json.loads(msgspec.json.encode(REPORT))
    assert {
        "efficiency",
        "efficiency_used",
        "samples_per_s",
        "ideal_samples_per_s",
        "step_s",
        "predicted_step_s",
        "loss_first",
        "loss_last",
        "heldout_loss",
        "devices",
    } <= set(told)
    assert {"name", "samples_per_step", "busy", "seconds"} <= set(told["devices"][0])
    assert told["devices"][0]["seconds"]["compute"] == pytest.approx(1.0)
    assert told["heldout_loss"] == 2.5
    assert told["predicted_step_s"] == 1.15


def test_what_is_unknown_is_null_not_missing():
    plan = msgspec.structs.replace(PLAN, prediction=None)
    told = json.loads(msgspec.json.encode(account(TYPICAL, plan, SOLO)))
    assert told["predicted_step_s"] is None
    assert told["heldout_loss"] is None


def test_the_prediction_error_is_relative_to_the_measured_step():
    assert REPORT.prediction_error == pytest.approx(1.15 / 1.2 - 1)
    assert REPORT.predicted_source == "fitted"


def test_a_device_that_cannot_do_the_job_alone_adds_nothing_and_is_noted():
    report = account(TYPICAL, PLAN, SOLO | {"lab/old": None})
    assert report.ideal_samples_per_s == pytest.approx(14)
    assert report.efficiency == pytest.approx(report.efficiency_used)
    assert any(note.startswith("lab/old cannot do the job alone") for note in report.notes)
    assert sum(report.lost_s.values()) == pytest.approx(report.gap_s, abs=1e-12)


def test_unsplit_solo_rates_are_noted():
    assert not any("not split" in note for note in REPORT.notes)
    report = account(TYPICAL, PLAN, predicted_solo(PLAN))
    assert any("not split by cause" in note for note in report.notes)
    assert report.devices[0].solo_samples_per_s.source == "fitted"


def test_a_missing_solo_rate_is_an_error_for_used_and_for_left_out_devices():
    for name in ("lab/b", "lab/old"):
        with pytest.raises(UnknownNameError, match=name):
            account(TYPICAL, PLAN, {k: v for k, v in SOLO.items() if k != name})
    with pytest.raises(UnknownNameError, match="far/c"):
        account(TYPICAL, PLAN, SOLO | {"far/c": None})


def test_a_used_device_without_seconds_is_an_error():
    seconds = {name: SECONDS[name] for name in ("lab/a", "lab/b")}
    with pytest.raises(PlanMismatchError, match="far/c"):
        account(msgspec.structs.replace(TYPICAL, seconds=seconds), PLAN, SOLO)


def test_a_plan_of_several_stages_needs_the_worth_of_each_device():
    stages = tuple(
        Stage(layers=(layer,), shares=(Share(devices=(device,), samples=2),))
        for layer, device in (("embed", "lab/a"), ("head", "lab/b"))
    )
    plan = Plan(global_batch=14, pipelines=(Pipeline(samples=14, micro_batch=2, stages=stages),))
    solo = {name: SOLO[name] for name in ("lab/a", "lab/b")}
    with pytest.raises(UsageError, match="in its prediction alone"):
        account(TYPICAL, plan, solo)

    def worth(a: float, b: float) -> Plan:
        told = Prediction(step_s=1.0, lower_s=1.0, upper_s=1.0, useful_samples={"lab/a": a, "lab/b": b})
        return msgspec.structs.replace(plan, prediction=told)

    with pytest.raises(UsageError, match="sum to 13"):
        account(TYPICAL, worth(9.0, 4.0), solo)
    report = account(TYPICAL, worth(9.5, 4.5), solo)
    assert sum(report.lost_s.values()) == pytest.approx(report.gap_s, abs=1e-12)


def test_solo_seconds_must_fit_into_the_rate():
    rate = Figure(value=8, source="measured")
    with pytest.raises(ValueError, match="at most"):
        Solo(samples_per_s=rate, seconds={"optimizer": 0.2})
    with pytest.raises(ValueError, match="compute"):
        Solo(samples_per_s=rate, seconds={"compute": 0.1})
    assert sum(Solo(samples_per_s=rate, seconds={"input": 0.1}).seconds_of(4).values()) == pytest.approx(0.5)


def test_one_device_alone_at_its_solo_rate_loses_nothing():
    plan = Plan(global_batch=8, pipelines=(pipeline("lab/a", 8, 4),))
    typical = msgspec.structs.replace(
        TYPICAL, step_s=1.0, seconds={"lab/a": {"compute": 0.96, "optimizer": 0.04}}
    )
    report = account(typical, plan, {"lab/a": SOLO["lab/a"]})
    assert report.efficiency == pytest.approx(1.0)
    assert report.lost_s == pytest.approx(dict.fromkeys(LOSS_CAUSES, 0.0))


def test_used_devices_that_cannot_hold_the_model_count_as_if_their_memory_sufficed():
    told = Prediction(
        step_s=1.0,
        lower_s=1.0,
        upper_s=1.0,
        solo_samples_per_s={"lab/a": 8.0},
        unbounded_samples_per_s={"lab/b": 4.0},
        useful_samples={"lab/a": 7.0, "lab/b": 3.0},
    )
    stages = tuple(
        Stage(layers=(name,), shares=(Share(devices=(f"lab/{name}",), samples=5),)) for name in "ab"
    )
    cut = Plan(
        global_batch=10,
        pipelines=(Pipeline(samples=10, micro_batch=5, stages=stages),),
        prediction=told,
    )
    report = account(TYPICAL, cut, predicted_solo(cut))
    assert report.ideal_samples_per_s == pytest.approx(12)
    assert {d.name: d.samples_per_step for d in report.devices} == {"lab/a": 7.0, "lab/b": 3.0}
    assert any("lab/b cannot hold the model" in note for note in report.notes)
    assert not any("lab/a cannot" in note for note in report.notes)
    assert sum(report.lost_s.values()) == pytest.approx(report.gap_s)
