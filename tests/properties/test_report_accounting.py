"""For any run the causes of lost time add up to the gap, per device and in sum."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evener.core.figures import Figure
from evener.core.plan import LeftOut, Pipeline, Plan, Share, Stage
from evener.core.records import StepRecord
from evener.core.trace import CAUSES
from evener.report.accounting import account
from evener.report.results import Solo
from evener.report.steps import typical_step

positive = st.floats(1e-4, 1e4)
part = st.floats(0.0, 1.0)


@st.composite
def runs(draw):
    shares = draw(st.lists(st.integers(0, 40), min_size=1, max_size=5).filter(any))
    names = [f"host/d{i}" for i in range(len(shares))]
    solo = {}
    for name in names:
        rate = draw(positive)
        split = {c: draw(part) * 0.3 / rate for c in ("optimizer", "input", "overhead")}
        solo[name] = Solo(samples_per_s=Figure(value=rate, source="measured"), seconds=split)
    records = []
    for step in range(draw(st.integers(1, 9))):
        step_s = draw(positive)
        seconds = {n: {c: draw(part) * step_s / 4 for c in CAUSES} for n in names}
        records.append(StepRecord(step=step, samples=sum(shares), step_s=step_s, seconds=seconds))
    plan = Plan(
        global_batch=sum(shares),
        pipelines=tuple(
            Pipeline(
                samples=k,
                micro_batch=k,
                stages=(Stage(layers=("all",), shares=(Share(devices=(n,), samples=k),)),),
            )
            for n, k in zip(names, shares, strict=True)
            if k
        ),
        left_out=tuple(
            LeftOut(device=n, reason="no share") for n, k in zip(names, shares, strict=True) if not k
        ),
    )
    return records, plan, solo


@settings(max_examples=60, deadline=None)
@given(run=runs(), warmup=st.integers(0, 10))
def test_causes_add_up_to_the_gap(run, warmup):
    records, plan, solo = run
    typical = typical_step(records, global_batch=plan.global_batch, warmup_steps=warmup)
    report = account(typical, plan, solo)
    ideal_s = plan.global_batch / sum(x.samples_per_s.value for x in solo.values())
    scale = max(report.step_s, ideal_s)
    assert report.gap_s == pytest.approx(report.step_s * (1 - report.efficiency), abs=1e-9 * scale)
    assert sum(report.lost_s.values()) == pytest.approx(report.step_s - ideal_s, abs=1e-9 * scale)
    for device in report.devices:
        alone_s = device.samples_per_step / device.solo_samples_per_s.value
        lost_s = report.step_s - alone_s
        assert sum(device.lost_s.values()) == pytest.approx(lost_s, abs=1e-9 * max(report.step_s, alone_s))
        if device.seconds:
            assert sum(device.seconds.values()) == pytest.approx(report.step_s, rel=1e-9)
