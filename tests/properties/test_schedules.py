"""Schedules of random plans: evaluators agree, printing loses nothing, same input, same bytes."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.random_plans import random_costs, random_plan
from benchmarks.simulator_agreement import compare
from evener.core.faults import Fault, FaultScript, parse_faults
from evener.report.chrome import chrome_trace
from evener.schedules import NAMES, check, make
from evener.sim import simulate

SEEDS = st.integers(0, 2**32)


@given(seed=SEEDS)
@settings(max_examples=300)
def test_both_evaluators_agree(seed: int):
    assert compare(seed) <= 1e-9


@given(seed=SEEDS, name=st.sampled_from(NAMES))
@settings(max_examples=20)
def test_same_input_same_bytes(seed: int, name: str):
    def played() -> tuple[str, bytes]:
        rng = random.Random(seed)
        plan = random_plan(rng, max_devices=3)
        costs = random_costs(rng, plan)
        schedule = make(plan, name=name, costs=costs)
        return str(schedule), chrome_trace(simulate(schedule, plan, costs).trace)

    assert played() == played()


@given(seed=SEEDS, data=st.data())
@settings(max_examples=100)
def test_a_schedule_with_one_action_gone_is_no_schedule(seed: int, data):
    rng = random.Random(seed)
    plan = random_plan(rng)
    schedule = make(plan, name=rng.choice(("gpipe", "1f1b", "zero-bubble", "interleaved")))
    device = data.draw(st.sampled_from(sorted(schedule.actions)))
    row = list(schedule.actions[device])
    del row[data.draw(st.integers(0, len(row) - 1))]
    broken = type(schedule)(actions=schedule.actions | {device: tuple(row)})
    assert check(broken, plan)


NAMES_OF_DEVICES = st.from_regex(r"[a-z]+[0-9]/gpu[0-9]", fullmatch=True)
STEP = st.integers(0, 999) | st.integers(0, 99).map(lambda x: x + 0.5)
FAULTS = st.one_of(
    st.builds(Fault, type=st.sampled_from(["leave", "join", "oom"]), device=NAMES_OF_DEVICES, at_step=STEP),
    st.builds(
        Fault, type=st.just("slow"), device=NAMES_OF_DEVICES, at_step=STEP, factor=st.sampled_from([0.5, 3])
    ),
    st.builds(
        Fault,
        type=st.just("cut"),
        device=NAMES_OF_DEVICES,
        other=NAMES_OF_DEVICES,
        at_step=STEP,
        for_s=st.sampled_from([0.25, 5]),
    ),
)


@given(st.lists(FAULTS, max_size=5))
def test_a_fault_script_reads_back(faults):
    script = FaultScript(faults=tuple(sorted(faults, key=lambda f: f.at_step)))
    assert parse_faults(str(script)) == script
