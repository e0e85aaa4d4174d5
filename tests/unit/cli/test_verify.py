"""What `evener verify` says beside yes and no."""

import signal
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from evener.cli.interrupts import TERMINATED
from evener.cli.main import main
from evener.cli.verify import conditions_of, folder_for, verdict_of
from evener.core.fleet import Device, Fleet
from evener.core.plan import Pipeline, Plan, Share, Stage
from evener.errors import FileError, UsageError
from evener.session.exactness import verify as exactness
from evener.session.exactness.reference import DROPOUT_OFF, differing_buffers, reference
from evener.session.exactness.verify import Exactness
from evener.session.planning.inexact import DROPOUT
from evener.session.recipe import load_recipe
from evener.session.request import Request

STAGE = Stage(layers=("0",), shares=(Share(devices=("lab/a",), samples=4),))
PLAN = Plan(global_batch=4, pipelines=(Pipeline(samples=4, micro_batch=4, stages=(STAGE,)),))


def result(gradient: float, gradient_float64: float, parameters: float) -> Exactness:
    good = gradient <= 1e-6 and gradient_float64 <= 1e-12
    return Exactness(
        exact=good,
        gradient_error=gradient,
        gradient_error_float64=gradient_float64,
        parameter_error_float64=parameters,
        steps=2,
        plan=PLAN,
        as_planned=good,
    )


@pytest.mark.parametrize(
    ("found", "code", "hinted"),
    [
        (result(1e-7, 1e-15, 1e-14), 0, False),
        (result(0.3, 0.3, 0.1), 1, True),  # two devices with 1 and 3 valid labels, each its own mean
        (result(2e-6, 1e-15, 1e-14), 1, False),  # float64 agrees: rounding, not the loss
    ],
)
def test_a_result_that_differs_in_kind_comes_with_what_would_work(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    found: Exactness,
    code: int,
    hinted: bool,
) -> None:
    script = tmp_path / "job.py"
    script.write_text("def recipe(): ...")
    monkeypatch.setattr(exactness, "verify", lambda request: found)
    with pytest.raises(SystemExit) as done:
        main(["verify", str(script), "--devices", "cpu", "--run-dir", str(tmp_path)])
    assert done.value.code == code
    said = capsys.readouterr().out
    hints = ("weight=", "ignore_index", "class weights", "reduction='sum'", "mixes the samples of a batch")
    assert [hint in said for hint in (*hints, "a clamp", "EV501")] == [hinted] * 7


def test_buffers_that_are_not_one_devices_are_named() -> None:
    """Of three devices `seen` was the first one's share, and verify said yes."""
    model = nn.Sequential(nn.BatchNorm1d(2))
    for name, value in (("seen", 104), ("total", 104.0), ("mask", float("-inf")), ("passing", 1.0)):
        model.register_buffer(name, torch.tensor(value), persistent=name != "passing")
    ours = model.state_dict() | {"0.running_mean": torch.ones(2)}
    assert differing_buffers(ours, model, 1e-10) == ()
    off = ours | {"seen": torch.tensor(56), "total": torch.tensor(104.1)}
    assert differing_buffers(off, model, 1e-10) == ("seen", "total")
    found = replace(result(0.0, 0.0, 0.0), exact=False, buffers=("seen", "total"))
    assert verdict_of(found) == "no: buffers that are not one device's: seen, total"
    both = replace(found, compressed=("int8",))
    named = "; buffers that are not one device's: seen, total"
    assert verdict_of(both) == (
        "no, as the plan says: int8 between hosts; gradient error 0e+00, within the 1e-06 that follows"
        + named
    )
    off_too = verdict_of(replace(both, gradient_error=0.1, as_planned=False))
    assert off_too.endswith("that follows from int8 between hosts" + named)


@pytest.mark.parametrize(("rate", "off"), [(0.5, True), (0.0, False)])
def test_dropout_that_was_switched_off_is_told(tmp_path: Path, rate: float, off: bool) -> None:
    script = tmp_path / "job.py"
    script.write_text(
        "import torch, evener as ev\n"
        "from torch import nn\n"
        "def recipe():\n"
        f"    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout({rate}))\n"
        "    return ev.Recipe(model=model, dataset=[(torch.ones(2), torch.ones(2))] * 4, loss=nn.MSELoss(),\n"
        "                     optimizer=lambda p: torch.optim.SGD(p, lr=0.1), global_batch=4)\n"
    )
    fleet = Fleet(devices=(Device(name="lab/a", kind="cpu"),))
    request = Request(fleet=fleet, run_dir=str(tmp_path), script=str(script))
    _, _, notes = reference(request, PLAN, 1)
    assert notes == ((DROPOUT, DROPOUT_OFF) if off else ())


def test_what_was_not_used_is_said_to_be_untested(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(
        "import torch, evener as ev\n"
        "from torch import nn\n"
        "def recipe():\n"
        "    return ev.Recipe(model=nn.Linear(2, 2), dataset=[(torch.ones(2), torch.ones(2))] * 4,\n"
        "                     loss=nn.MSELoss(), optimizer=torch.optim.AdamW, global_batch=4,\n"
        "                     compress=('bf16',))\n"
    )
    fleet = Fleet(devices=(Device(name="lab/a", kind="cpu"), Device(name="lab2/b", kind="cpu")))
    request = Request(fleet=fleet, run_dir=str(tmp_path), script=str(script), fewer=("local:4",))
    why = "limit: links; --fewer local:4:1:0 is not used: one exchange a step, 2 ms"
    said = exactness.untested(request, load_recipe(request.script, 0), replace(PLAN, why=why))
    assert said == (
        "lab2/b took no part in these steps: not tested",
        "--fewer local:4:1:0 was not used, so it was not tested: one exchange a step, 2 ms",
        "--compress bf16 was not used, so it was not tested",
    )


def test_each_line_says_what_it_was_computed_with() -> None:
    found = replace(result(1e-3, 1e-15, 1e-14), compressed=("int8",), fewer="local:4:1:0", exact=False)
    single, double = conditions_of(found)
    assert "with int8 between hosts" in single and "without int8" in double
    assert all("against a plain loop that does local:4:1:0 too" in words for words in (single, double))
    assert conditions_of(result(1e-8, 1e-15, 1e-14)) == ("", "")


def test_one_device_is_not_compared_with_itself(tmp_path: Path) -> None:
    """ "exact: yes" was said of a model that mixes samples, where two devices said no by 7 %."""
    script = tmp_path / "job.py"
    script.write_text(
        "import torch, evener as ev\n"
        "def recipe():\n"
        "    return ev.Recipe(model=torch.nn.Linear(2, 2), dataset=[(torch.ones(2), torch.ones(2))] * 32,\n"
        "                     loss=torch.nn.MSELoss(), optimizer=torch.optim.AdamW, global_batch=32)\n"
    )
    alone = Request(fleet=Fleet(devices=(Device(name="lab/a", kind="cpu"),)), run_dir="", script=str(script))
    sizes = [exactness.in_two_parts(replace(alone, global_batch=b or None)).micro_batch for b in (0, 3, 2, 1)]
    assert sizes == [22, 2, 1, 1]  # of two samples the larger part was both
    given = replace(alone, plan=PLAN)
    assert exactness.in_two_parts(given) == given
    (pipeline,) = PLAN.pipelines
    stage = replace(STAGE, shares=(Share(devices=("lab/a",), samples=3),))
    parts = replace(PLAN, pipelines=(replace(pipeline, micro_batch=3, stages=(stage,)),))
    assert exactness._alone(parts) == (
        "",
        ("lab/a alone, its batches in parts of 3 and 1 samples: no sum over devices was tested",),
    )
    nothing, _ = exactness._alone(PLAN)
    said = verdict_of(replace(result(0.0, 0.0, 0.0), exact=False, nothing=nothing))
    assert said.startswith("nothing was compared: lab/a took every batch at once")
    assert "--rehearse FLEET" in said


def test_the_files_of_a_comparison_go_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were left in runs/ of whatever folder the command was given in, then in /tmp: often memory."""
    runs = tmp_path / "runs"
    monkeypatch.setenv("EVENER_RUNS", str(runs))
    with folder_for(None) as folder:
        assert folder.parent == runs and folder.is_dir()
    assert not runs.exists()
    with folder_for(None):
        (runs / "other").mkdir()
    assert [p.name for p in runs.iterdir()] == ["other"]
    with folder_for(tmp_path) as folder:
        pass
    assert folder == tmp_path and tmp_path.is_dir()
    monkeypatch.setenv("EVENER_RUNS", str(Path(__file__)))
    with pytest.raises(FileError, match=r"cannot make the run.s folder .*test_verify.py"), folder_for(None):
        pass


def test_sigterm_leaves_nothing_of_a_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder stayed, as SIGTERM ended the command on the spot."""
    (tmp_path / "job.py").write_text("def recipe(): ...")
    monkeypatch.setenv("EVENER_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(exactness, "verify", lambda request: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(SystemExit) as done:
        main(["verify", str(tmp_path / "job.py"), "--devices", "cpu"])
    assert done.value.code == TERMINATED and [p.name for p in tmp_path.iterdir()] == ["job.py"]


def test_it_starts_its_own_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each of torchrun's had a run folder of its own, and all but the first ended after float32."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit) as done:
        main(["verify", str(tmp_path / "job.py")])
    assert done.value.code == 2 and "evener verify SCRIPT without torchrun" in capsys.readouterr().err
    with pytest.raises(UsageError, match="starts its own processes"):
        exactness.verify(Request(fleet=Fleet(devices=(Device(name="lab/a", kind="cpu"),)), run_dir=""))
