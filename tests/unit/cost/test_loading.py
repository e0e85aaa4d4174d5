"""What devices hold at most while state is put into them."""

from msgspec.structs import replace

from benchmarks.random_plans import stage
from evener.core.fleet import Device, Fleet
from evener.core.plan import Pipeline, Plan
from evener.cost.loading import load_bytes
from evener.cost.model import CostModel
from evener.planner import plan as best_plan
from tests.unit.cost.test_actions import CUT, fleet, one_pipeline, profile

STATE = replace(profile(), state_bytes=24_000_000)  # twice the parameters of a to d, 3 MB each


def test_an_accelerator_gets_each_tensor_once_and_a_cpu_holds_the_file_too():
    card = replace(fleet().devices[0], type="cuda")
    model = CostModel(fleet=Fleet(devices=(card, *fleet().devices[1:])), profile=STATE)
    assert load_bytes(model, CUT) == {"x/0": 3 * 6_000_000, "y/0": 2 * 3 * 6_000_000}


def test_each_layer_counts_once_and_stages_of_the_host_do_not():
    model = CostModel(fleet=Fleet(devices=fleet().devices), profile=STATE)
    twice = tuple(Pipeline(samples=4, micro_batch=4, stages=(stage("abcd", ("y/0", 4)),)) for _ in range(2))
    assert load_bytes(model, Plan(global_batch=8, pipelines=twice)) == {"y/0": 2 * 3 * 12_000_000}
    both = one_pipeline(stage("a", ("y/0", 4)), stage("bc", ("x/0", 4)), stage("d", ("y/0", 4)))
    assert load_bytes(model, both) == {"y/0": 2 * 3 * 6_000_000, "x/0": 2 * 3 * 6_000_000}
    hosted = tuple(replace(s, residence="host") for s in CUT.pipelines[0].stages[:1])
    stages = (*hosted, CUT.pipelines[0].stages[1])
    plan = replace(CUT, pipelines=(replace(CUT.pipelines[0], stages=stages),))
    assert set(load_bytes(model, plan)) == {"y/0"}


def test_the_planner_tells_it_with_every_plan():
    from evener.core.job import Job

    devices = (Device(name="x/0", kind="fast"),)
    made = best_plan(Fleet(devices=devices), STATE, Job(global_batch=8)).plan
    assert made.prediction is not None
    assert made.prediction.load_bytes == {"x/0": 2 * (12_000_000 + 24_000_000)}
