import pytest

from benchmarks.random_plans import stage
from evener.core.figures import line
from evener.core.plan import Pipeline, Plan
from evener.errors import UnknownNameError
from evener.schedules import make
from evener.schedules.costs import Costs, Memory, Reduction, Wire
from evener.sim import evaluate, simulate, step_seconds
from evener.sim.windows import Cut, Slow, Windows
from tests.unit.schedules.plans import chain, data_parallel, stage_costs


def test_k15_the_sum_of_the_stages_and_the_slowest_for_the_rest():
    """Stages of 6 and 6 with 8 micro-batches: 12 + 7 · 6 = 54; 4 and 12: 16 + 7 · 12 = 100."""
    plan = chain(["h/0", "h/1"], 8)
    for seconds, step_s in (((6.0, 6.0), 54.0), ((4.0, 12.0), 100.0)):
        costs = stage_costs(plan, dict(enumerate(seconds)))
        schedule = make(plan, name="1f1b")
        assert step_seconds(schedule, plan, costs) == pytest.approx(step_s)
        assert simulate(schedule, plan, costs).step_s == pytest.approx(step_s)


def test_data_parallel_is_the_slowest_device_and_the_reduction_it_leaves_exposed():
    """h/0: 0.5 + 3 · 3 s, h/1: 0.1 + 6 s. The second piece waits for h/0's end, the first hides behind it."""
    plan = data_parallel(6, 2)
    holders = ((0, "h/0"), (1, "h/1"))
    pieces = ((0.5, (0.5, 0.5)), (0.25, (1.0, 1.0)))
    costs = stage_costs(
        plan,
        {0: 3.0, 1: 6.0},
        reductions=(Reduction(layers=("a", "b"), holders=holders, pieces=pieces),),
        update_s={"h/0": 0.4, "h/1": 0.1},
        overhead_s={"h/0": 0.1},
    )
    outcome = simulate(make(plan), plan, costs)
    assert outcome.step_s == pytest.approx(0.5 + 9 + 0.25)
    assert outcome.step_s == evaluate(make(plan), plan, costs).step_s
    slow, fast = (outcome.trace.seconds_by_cause(d) for d in ("h/0", "h/1"))
    assert {k: round(v, 9) for k, v in slow.items() if v} == {
        "compute": 9.0, "optimizer": 0.4, "overhead": 0.1, "reduce": 0.25
    }  # fmt: skip
    assert {k: round(v, 9) for k, v in fast.items() if v} == {
        "compute": 6.0, "optimizer": 0.1, "wait": 3.4, "reduce": 0.25
    }  # fmt: skip


def test_equal_stages_wait_by_the_schedules_shape_and_unequal_ones_for_the_slow_peer():
    plan = chain(["h/0", "h/1"], 4)
    equal = evaluate(make(plan, name="1f1b"), plan, stage_costs(plan, {0: 3.0, 1: 3.0})).trace
    assert all(equal.seconds_by_cause(d)["wait"] == pytest.approx(0) for d in plan.devices)
    assert all(equal.seconds_by_cause(d)["bubble"] == pytest.approx(3) for d in plan.devices)
    unequal = evaluate(make(plan, name="1f1b"), plan, stage_costs(plan, {0: 3.0, 1: 9.0})).trace
    quick = unequal.seconds_by_cause("h/0")
    assert quick["wait"] > quick["bubble"] > 0


def test_what_a_wire_takes_and_what_shows_of_it():
    """One micro-batch: F 1 s, message 0.1 + 0.4 s, F 1 s, B 2 s, message back, B 2 s."""
    plan = chain(["h/0", "h/1"], 1)
    wires = {(a, b): Wire(curve=line(0.1, 1e3)) for a, b in (("h/0", "h/1"), ("h/1", "h/0"))}
    costs = stage_costs(plan, {0: 3.0, 1: 3.0}, wires=wires, output_bytes={0: 400.0})
    outcome = simulate(make(plan, name="1f1b"), plan, costs)
    assert outcome.step_s == pytest.approx(7.0)
    assert outcome.trace.seconds_by_cause("h/0")["transfer"] == pytest.approx(0.5)
    assert outcome.trace.seconds_by_cause("h/1")["transfer"] == pytest.approx(0.5)


def two_chains() -> Plan:
    """Two pipelines whose messages leave at the same moment."""
    pipelines = tuple(
        Pipeline(samples=1, micro_batch=1, stages=(stage("a", (f"x/{i}", 1)), stage("b", (f"y/{i}", 1))))
        for i in (0, 1)
    )
    return Plan(global_batch=2, pipelines=pipelines)


def shared(plan: Plan, bus: str | None) -> Costs:
    wires = {(a, b): Wire(curve=line(0.1, 1e3), bus=bus) for a in plan.devices for b in plan.devices}
    seconds = dict.fromkeys(range(4), 3.0)
    return stage_costs(plan, seconds, wires=wires, output_bytes=dict.fromkeys(range(4), 400.0))


def test_pairs_on_one_bus_share_its_rate():
    plan = two_chains()
    schedule = make(plan, name="1f1b")
    alone, together = (simulate(schedule, plan, shared(plan, bus)).step_s for bus in (None, "uplink"))
    assert alone == pytest.approx(7.0)
    assert together == pytest.approx(7.0 + 2 * 0.4), (
        "each message takes 0.8 s of the bus and 0.1 s of latency"
    )
    assert evaluate(schedule, plan, shared(plan, "uplink")).step_s == pytest.approx(7.0), (
        "no bus in the quick pass"
    )


def test_a_bus_gives_its_whole_rate_to_who_is_left():
    """400 and 100 bytes start together: 0.2 s at half the rate for both, then 0.3 s at full rate."""
    plan = two_chains()
    costs = shared(plan, "uplink")
    costs = stage_costs(
        plan, dict.fromkeys(range(4), 3.0), wires=costs.wires, output_bytes={0: 400.0, 2: 100.0}
    )
    trace = simulate(make(plan, name="1f1b"), plan, costs).trace
    forward = {s.device: s for s in trace.spans if s.action in ("1F0", "3F0")}
    assert forward["y/1"].start_s == pytest.approx(1 + 0.2 + 0.1)
    assert forward["y/0"].start_s == pytest.approx(1 + 0.5 + 0.1)


def test_a_slow_spell_stretches_what_runs_in_it():
    """3 s of work; from second 1 on at a third of the speed for 3 s: 1 + 3 + 1."""
    plan = data_parallel(2)
    costs = stage_costs(plan, {0: 3.0})
    windows = Windows(slow=(Slow(device="h/0", factor=3, start_s=1, end_s=4),))
    assert simulate(make(plan), plan, costs, windows=windows).step_s == pytest.approx(5.0)


def test_a_cut_stops_what_is_on_its_way_and_reductions_across_it():
    plan = two_chains()
    schedule = make(plan, name="1f1b")
    windows = Windows(cuts=(Cut(a="x", b="y", start_s=1.2, end_s=3.2),))
    outcome = simulate(schedule, plan, shared(plan, None), windows=windows)
    assert outcome.step_s == pytest.approx(9.0)
    assert simulate(schedule, plan, shared(plan, "u"), windows=windows).step_s == pytest.approx(9.8)
    other = Windows(cuts=(Cut(a="x", b="z", start_s=1.2, end_s=3.2),))
    assert simulate(schedule, plan, shared(plan, None), windows=other).step_s == pytest.approx(7.0)
    dp = data_parallel(2, 2)
    reduction = Reduction(layers=("a",), holders=((0, "h/0"), (1, "h/1")), pieces=((1.0, (1.0, 1.0)),))
    costs = stage_costs(dp, {0: 3.0, 1: 3.0}, reductions=(reduction,))
    cut = Windows(cuts=(Cut(a="h/0", b="h/1", start_s=3.5, end_s=5.5),))
    assert simulate(make(dp), dp, costs, windows=cut).step_s == pytest.approx(3 + 1 + 2)


def test_memory_over_time():
    """1F1B holds two micro-batches on the first of two stages, one on the last."""
    plan = chain(["h/0", "h/1"], 4)
    memory = {d: Memory(fixed_bytes=100, saved_bytes={0: 7.0, 1: 5.0}) for d in plan.devices}
    outcome = simulate(make(plan, name="1f1b"), plan, stage_costs(plan, {0: 3.0, 1: 3.0}, memory=memory))
    assert outcome.peak_bytes == {"h/0": 114, "h/1": 105}
    assert [held for _, held in outcome.memory["h/1"]] == [100, *[105, 100] * 4]
    assert outcome.memory["h/0"][-1][1] == 100


def test_what_arrives_during_the_optimisers_step_waits_for_its_end():
    plan = chain(["h/0", "h/1"], 1)
    costs = stage_costs(plan, {0: 3.0, 1: 3.0}, update_s={"h/1": 4.0})
    schedule = make(plan, name="1f1b")
    assert simulate(schedule, plan, costs).step_s == pytest.approx(4 + 3 + 2)
    assert evaluate(schedule, plan, costs).step_s == pytest.approx(4 + 3 + 2)


def test_a_missing_number_is_named():
    plan = chain(["h/0", "h/1"], 1)
    costs = stage_costs(plan, {0: 3.0, 1: 3.0}, wires={})
    with pytest.raises(UnknownNameError, match="no link from h/0 to h/1"):
        simulate(make(plan, name="1f1b"), plan, costs)
    costs = Costs(compute_s={})
    with pytest.raises(UnknownNameError, match="no seconds for F of stage 0 on h/0 with 1 sample"):
        evaluate(make(plan, name="1f1b"), plan, costs)
