"""Jobs on rehearsed accelerators: the checks of tests/gpu, and running out of memory in mid-job."""

import multiprocessing
import re
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from evener.core.catalogue import FleetFile, FleetLine, Scale, resolved
from evener.core.figures import Figure
from evener.core.fleet import Device, Fleet
from evener.core.plan import Pipeline, Plan, Share, Stage
from evener.cost.evaluate import CostModel, evaluate
from evener.session.checkpoints.save_rule import Rule
from evener.session.checkpoints.tensors import first_gradients
from evener.session.exactness.verify import verify
from evener.session.launching.launch import launch
from evener.session.planning.measure import profile_recipe
from evener.session.request import Request

SCRIPT = """
import torch, evener as ev
from torch import nn

def recipe():
    torch.manual_seed(1)
    x, y = torch.randn(960, 200), torch.randint(0, 3, (960,))
    hidden = [m for _ in range({hidden}) for m in (nn.Linear(400, 400), nn.Tanh())]
    layers = [nn.Linear(200, 400), nn.Tanh(), *hidden, nn.Linear(400, 3)]
    return ev.Recipe(model=nn.Sequential(*layers), dataset=list(zip(x, y)), loss=nn.CrossEntropyLoss(),
                     global_batch={global_batch}, max_norm=1.0, optimizer=lambda p: {optimizer})
"""
NAMES = ["0", "1", "2", "3", "4"]


def fleet(*devices: Device, slower: float = 100.0, smaller: float = 1.0) -> Fleet:
    """Two cards of the catalogue on one board, or `devices`."""
    cards = (Device(name="lab/gpu0", kind="RTX 3080"), Device(name="lab/gpu1", kind="RTX 3060"))
    file = FleetFile(
        devices=devices or cards,
        links=(FleetLine(a="lab", b="lab", kind="PCIe 4.0 x16"),),
        scaled=Scale(slower=slower, smaller=smaller),
    )
    return resolved(file, "here").as_rehearsed()


def request_for(folder: Path, cards: Fleet, **more: object) -> Request:
    script = folder / "job.py"
    global_batch = more.pop("batch", 96)
    optimizer = "torch.optim.SGD(p, lr=0.1)" if global_batch > 96 else "torch.optim.AdamW(p, lr=1e-3)"
    hidden = more.pop("hidden", 1)
    text = SCRIPT.format(global_batch=global_batch, optimizer=optimizer, hidden=hidden)
    script.write_text(text, encoding="utf-8")
    return Request(
        fleet=cards,
        rehearse=True,
        script=str(script),
        run_dir=str(folder),
        quiet=True,
        profile_s=2.0,
        **more,  # type: ignore[arg-type]
    )


def cut(*stages: tuple[str, dict[str, int]], samples: int = 96, **more: bool) -> Pipeline:
    """A pipeline over stages of one-letter layers with samples by device: ("01", {"gpu0": 8})."""
    made = tuple(
        Stage(
            layers=tuple(layers),
            shares=tuple(Share(devices=(f"lab/{d}",), samples=n) for d, n in held.items()),
            **more,
        )
        for layers, held in stages
    )
    return Pipeline(samples=samples, micro_batch=8, stages=made)


SHAPES = {
    "two stages": ("1f1b", [cut(("01", {"gpu0": 8}), ("234", {"gpu1": 8}))]),
    "zero bubble": ("zero-bubble", [cut(("01", {"gpu0": 8}), ("234", {"gpu1": 8}))]),
    "recomputed": ("1f1b", [cut(("01", {"gpu0": 8}), ("234", {"gpu1": 8}), recompute=True)]),
    "shared stage": ("gpipe", [cut(("01", {"gpu0": 5, "gpu1": 3}), ("234", {"gpu1": 8}))]),
    "a device twice": ("1f1b", [cut(("0", {"gpu1": 8}), ("12", {"gpu0": 8}), ("34", {"gpu1": 8}))]),
    "a pipeline and a whole model": (
        "1f1b",
        [cut(("01", {"gpu0": 8}), ("234", {"gpu1": 8}), samples=60), cut(("01234", {"gpu1": 8}), samples=36)],
    ),
}


def test_two_cards_train_one_model_exactly(tmp_path: Path) -> None:
    split = {"lab/gpu0": 67, "lab/gpu1": 29}
    found = verify(request_for(tmp_path, fleet(), batch_per_device=split, steps=3))
    assert found is not None and found.exact
    assert found.gradient_error_float64 < 1e-12 and found.parameter_error_float64 < 1e-10


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_of_plan_is_exact_over_two_cards(tmp_path: Path, shape: str) -> None:
    schedule, pipelines = SHAPES[shape]
    plan = Plan(global_batch=96, pipelines=tuple(pipelines), schedule=schedule)
    found = verify(request_for(tmp_path, fleet(), plan=plan, steps=2))
    assert found is not None and found.exact
    assert found.gradient_error_float64 < 1e-12 and found.parameter_error_float64 < 1e-10


def test_a_card_and_a_cpu_train_one_model(tmp_path: Path) -> None:
    cpu = Device(name="lab/cpu", kind="AMD Ryzen 7 5800X", threads=1)
    cards = fleet(Device(name="lab/gpu0", kind="RTX 3080"), cpu, slower=20.0)
    split = {"lab/gpu0": 90, "lab/cpu": 6}
    outcome = launch(request_for(tmp_path, cards, batch_per_device=split, steps=3))
    assert outcome.parameters_agree and outcome.plan.devices == ("lab/gpu0", "lab/cpu")


def test_predicted_memory_is_what_the_cards_held(tmp_path: Path) -> None:
    outcome = launch(request_for(tmp_path, fleet(smaller=64.0), keep_all=True, steps=3))
    assert outcome.plan.prediction is not None
    for name, predicted in outcome.plan.prediction.memory_bytes.items():
        assert predicted == pytest.approx(outcome.peak_bytes[name].value, rel=0.05)


def halves(micro_batch: int) -> Plan:
    """Both cards take 480 samples of each global batch, at once or in smaller parts."""
    pipelines = tuple(
        Pipeline(
            samples=480,
            micro_batch=micro_batch,
            stages=(Stage(layers=tuple(NAMES), shares=(Share(devices=(d,), samples=micro_batch),)),),
        )
        for d in ("lab/gpu0", "lab/gpu1")
    )
    return Plan(global_batch=960, pipelines=pipelines)


def test_running_out_of_memory_ends_in_smaller_micro_batches_and_the_same_gradient(tmp_path: Path) -> None:
    roomy, tight = tmp_path / "roomy", tmp_path / "tight"
    roomy.mkdir(), tight.mkdir()
    wishes = {"plan": halves(480), "steps": 2, "keep_gradient": True, "dropout": False, "batch": 960}
    launch(request_for(roomy, fleet(), **wishes))
    whole = fleet(smaller=64.0)
    # Parameters and gradients are 1.9 MB; 480 samples at once take 3.5 MB more, and do not fit.
    memory = Figure(value=4.4e6, source="assumed")
    small = replace(whole.devices[1], kind="small card", memory_bytes=memory, framework_bytes=None)
    outcome = launch(request_for(tight, replace(whole, devices=(whole.devices[0], small)), **wishes))
    assert any("lab/gpu1 ran out of memory" in d for d in outcome.decisions), outcome.decisions
    (ours, *_), (wanted, *_) = first_gradients(tight), first_gradients(roomy)
    for name, gradient in wanted.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-5, atol=1e-7)


def in_turns(micro_batch: int) -> Plan:
    """Two stages, the first with 12 of 13 layers and two micro-batches in flight."""
    names = tuple(map(str, range(13)))
    stages = tuple(
        Stage(layers=layers, shares=(Share(devices=(device,), samples=micro_batch),))
        for layers, device in ((names[:12], "lab/gpu0"), (names[12:], "lab/gpu1"))
    )
    pipeline = Pipeline(samples=960, micro_batch=micro_batch, stages=stages)
    return Plan(global_batch=960, pipelines=(pipeline,), schedule="1f1b")


def test_the_cheaper_way_out_of_a_full_memory_is_taken_and_the_gradient_stays(tmp_path: Path) -> None:
    """Halves of 480 samples still fill the card; those of 240 mostly move weights: recompute is cheaper."""
    cards = fleet(slower=300.0, smaller=64.0)
    wishes = {"steps": 2, "keep_gradient": True, "dropout": False, "batch": 960, "hidden": 5}
    script = request_for(tmp_path, cards, **wishes).script
    wanted = {"fleet": cards, "rehearse": True, "micro_batches": (120, 240, 480), "seed": 0, "budget_s": 10.0}
    spawn = multiprocessing.get_context("spawn")  # a card stays with the process that opened it
    with ProcessPoolExecutor(1, spawn) as pool:
        profile = pool.submit(profile_recipe, script, report=print, **wanted).result()
    wishes["profile"] = profile
    roomy = tmp_path / "roomy"
    roomy.mkdir()
    launch(request_for(roomy, cards, plan=in_turns(480), **wishes))
    for micro_batch, way in ((480, "goes on with 240,"), (240, "recompute in stage 0,")):
        folder = tmp_path / str(micro_batch)
        folder.mkdir()
        plan = in_turns(micro_batch)
        needed = evaluate(CostModel(fleet=cards, profile=profile), plan).memory_bytes["lab/gpu0"]
        cap = Figure(value=0.965 * needed, source="assumed")
        tight = replace(cards.devices[0], memory_bytes=cap, framework_bytes=None)
        both = replace(cards, devices=(tight, cards.devices[1]))
        outcome = launch(request_for(folder, both, plan=plan, **wishes))
        told = [d for d in outcome.decisions if "lab/gpu0 ran out of memory" in d]
        assert told and all(way in d and "predicted" in d for d in told), outcome.decisions
        assert outcome.peak_bytes["lab/gpu0"].value < cap.value
        (ours, *_), (wanted, *_) = first_gradients(folder), first_gradients(roomy)
        for name, gradient in wanted.items():
            torch.testing.assert_close(ours[name], gradient, rtol=1e-5, atol=1e-7)


def test_taking_a_run_up_holds_what_was_predicted(tmp_path: Path) -> None:
    cards = fleet(smaller=64.0)
    first = launch(request_for(tmp_path, cards, keep_all=True, steps=2, checkpoint=Rule(steps=2)))
    assert first.plan.prediction is not None
    predicted = first.plan.prediction.load_bytes
    assert set(predicted) == {"lab/gpu0", "lab/gpu1"}
    again = request_for(tmp_path, cards, plan=first.plan, steps=3, resume="latest")
    outcome = launch(again)
    for name, expected in predicted.items():
        told = next(d for d in outcome.decisions if name in d and "taken up with at most" in d)
        mib, wanted = (float(x) for x in re.findall(r"([\d.]+) MiB", told))
        assert wanted == pytest.approx(expected / 2**20, rel=1e-3)
        assert mib == pytest.approx(wanted, rel=0.05), told
