"""The benchmarks run end to end: a step or two of each part, no claim on speed."""

import importlib
import math
import sys
from types import ModuleType

import pytest

from evener.core.figures import Figure
from evener.core.fleet import Device
from evener.core.profile import Layer, Profile, Timing
from evener.cost.evaluate import CostModel, evaluate
from tests.architecture.source import ROOT

FOLDER = ROOT / "benchmarks"


@pytest.fixture(scope="module")
def benchmark_folder():
    """Benchmarks are scripts that import their neighbours by bare name, as `python benchmarks/x.py` does."""
    sys.path.insert(0, str(FOLDER))
    yield FOLDER
    sys.path.remove(str(FOLDER))


def load(name: str) -> ModuleType:
    # As the benchmarks themselves import one another: what fails leaves no half of a module behind.
    return importlib.import_module(name)


def test_a_bar_is_passed_or_missed(benchmark_folder, capsys):
    common = load("common")
    assert common.Bar(name="x", value=1.9, at_least=1.9).passed
    assert not common.Bar(name="x", value=1.01, at_most=1.0).passed
    assert not common.Bar(name="x", value=float("nan"), at_least=0.0).passed
    missed = common.Bar(name="x", value=1.0, at_least=2.0)
    assert common.finish({"x": 1.0}, [missed], as_json=True) == 1
    assert '"passed": false' in capsys.readouterr().out.splitlines()[-1]


def test_a_failing_process_is_told_and_none_is_left(benchmark_folder):
    common = load("common")
    with pytest.raises(RuntimeError, match="process 0 failed"):
        common.run_processes(math.log, 2)  # process 0 asks for log(0), process 1 for log(1)


def test_evener_and_ddp_do_the_same_work(benchmark_folder):
    overhead = load("overhead")
    figures = overhead.overhead("two micro-batches", 2)
    losses = figures["final_loss"]
    assert losses["evener"] == pytest.approx(losses["ddp"], rel=1e-3)
    assert losses["control"] == losses["ddp"]
    assert figures["ratio"] > 0 and figures["triples"] == 2


def test_ddp_on_unequal_devices_is_held_back_by_the_slowest(benchmark_folder):
    common, paced = load("common"), load("paced")
    fleet = common.fleet_named("8-4-2-2").only(("lab1/a", "lab1/c"))
    alone = paced.solo_samples_per_s(str(common.TEXT), fleet, 8, (4,), 1)
    assert alone["lab1/a"] > 2 * alone["lab1/c"]
    step_s, _ = paced.ddp_step_s(str(common.TEXT), fleet, 8, 2)
    assert 8 / step_s < 2.1 * alone["lab1/c"]


def test_evener_and_torchs_pipeline_do_the_same_work(benchmark_folder):
    pipelines = load("pipeline_overhead")
    figures = pipelines.overhead("almost no compute", 2)
    assert figures["parameters_apart"] == 0
    assert figures["ratio"]["shared"] > 0 and figures["rounds"] == 2


def test_shapes_hold_every_layer_and_cost_what_both_evaluators_say(benchmark_folder):
    common, shapes = load("common"), load("pipeline_shapes")
    names = ["embed", *(f"blocks.{i}" for i in range(16)), "head"]
    fleet = common.fleet_named("8-4-2-2")
    profile = Profile(
        model="m",
        layers=tuple(Layer(name=n, num_params=1, param_bytes=4, output_bytes_per_sample=4) for n in names),
        timings=tuple(
            Timing(layer=n, kind=d.kind, micro_batch=b, forward_s=seconds(b, d), backward_s=seconds(2 * b, d))
            for n in names
            for d in fleet.devices[:3]
            for b in (1, 4)
        ),
    )
    model = CostModel(fleet=fleet, profile=profile)
    made = shapes.shapes(fleet, profile, 16)
    for name, plan in made.items():
        told = shapes.priced(fleet, profile, plan).prediction
        assert sum(told.useful_samples.values()) == pytest.approx(0 if plan.is_data_parallel else 16)
        if name != "a device twice":  # whose stages the other evaluator takes for two devices
            assert told.step_s == pytest.approx(evaluate(model, plan).step_s, rel=0.01)


def seconds(samples: int, device: Device) -> Figure:
    return Figure(value=samples * 1e8 / device.flops["float32"].value, source="measured")


def test_what_a_checkpoint_costs_is_measured(benchmark_folder):
    cost = load("checkpoint_cost")
    figures = cost.measure(width=32, depth=1, batch=4, block=2, quads=2)
    assert figures["checkpoints"] >= 1 and figures["checkpoint_mib"] > 0
    assert figures["waited_s"] >= 0 and 0 < figures["checkpoint_s"] < 20 and figures["step_s"] > 0


def test_serving_is_measured_in_pairs(benchmark_folder):
    serving = load("serving")
    low, high = serving.interval([1.0, 1.01, 1.02])
    assert 1.0 <= low <= high <= 1.02
    run = serving.measure(length=6, rounds=1)
    assert len(run["pairs"]) == 2 and len(run["controls"]) == 1 and run["step_s"] > 0
    assert run["core"]["server"] >= 0 and run["core"]["onlooker"] >= 0


@pytest.mark.parametrize("name", sorted(p.stem for p in FOLDER.glob("*.py")))
def test_every_benchmark_can_be_loaded(benchmark_folder, name):
    """One of them imported what had moved, and only a person who started it saw that."""
    assert load(name)
