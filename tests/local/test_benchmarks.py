"""The benchmarks of data parallelism run end to end: a step or two of each part, no claim on speed."""

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.architecture.source import ROOT

FOLDER = ROOT / "benchmarks"


@pytest.fixture(scope="module")
def benchmark_folder():
    """Benchmarks are scripts that import their neighbours by bare name, as `python benchmarks/x.py` does."""
    sys.path.insert(0, str(FOLDER))
    yield FOLDER
    sys.path.remove(str(FOLDER))


def load(folder: Path, name: str) -> ModuleType:
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def test_a_bar_is_passed_or_missed(benchmark_folder, capsys):
    common = load(benchmark_folder, "common")
    assert common.Bar(name="x", value=1.9, at_least=1.9).passed
    assert not common.Bar(name="x", value=1.01, at_most=1.0).passed
    assert not common.Bar(name="x", value=float("nan"), at_least=0.0).passed
    missed = common.Bar(name="x", value=1.0, at_least=2.0)
    assert common.finish({"x": 1.0}, [missed], as_json=True) == 1
    assert '"passed": false' in capsys.readouterr().out.splitlines()[-1]


def test_a_failing_process_is_told_and_none_is_left(benchmark_folder):
    common = load(benchmark_folder, "common")
    with pytest.raises(RuntimeError, match="process 0 failed"):
        common.run_processes(math.log, 2)  # process 0 asks for log(0), process 1 for log(1)


def test_evener_and_ddp_do_the_same_work(benchmark_folder):
    overhead = load(benchmark_folder, "overhead")
    figures = overhead.overhead("two micro-batches", 2)
    losses = figures["final_loss"]
    assert losses["evener"] == pytest.approx(losses["ddp"], rel=1e-3)
    assert losses["control"] == losses["ddp"]
    assert figures["ratio"] > 0 and figures["triples"] == 2


def test_ddp_on_unequal_devices_is_held_back_by_the_slowest(benchmark_folder):
    common, paced = load(benchmark_folder, "common"), load(benchmark_folder, "paced")
    fleet = common.fleet_named("8-4-2-2").only(("lab1/a", "lab1/c"))
    alone = paced.solo_samples_per_s(str(common.TEXT), fleet, 8, (4,), 1)
    assert alone["lab1/a"] > 2 * alone["lab1/c"]
    step_s, _ = paced.ddp_step_s(str(common.TEXT), fleet, 8, 2)
    assert 8 / step_s < 2.1 * alone["lab1/c"]
