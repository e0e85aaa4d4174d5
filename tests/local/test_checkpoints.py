"""A run is taken up again anywhere, under other plans and on other devices; the curve is one."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from evener.core.plan import Plan
from evener.core.words import counted
from evener.errors import StateError, UsageError
from evener.runtime.checkpoints.folder import Checkpoint, checkpoints_in, newest_good
from evener.session.launching.launch import launch
from tests.local.checkpoint_jobs import FOUR, ONE, THREE, TWO, D, losses, plan_of, request_for
from tests.local.plans import stage

WEIGHTLESS = 'batch_norm="wave", weight=lambda batch: 0'


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight steps on four unequal stages, saved before the fourth, while the run goes on, and at the end.

    One that is due while another is being written is left out: here only the first and the last are sure.
    """
    folder = tmp_path_factory.mktemp("runs") / "whole"
    launch(request_for(folder, FOUR, steps=8, every=3))
    return folder


def at(run: Path, step: int) -> Checkpoint:
    (found,) = [c for c in checkpoints_in(run) if c.manifest.position.step == step]
    return found


def state(checkpoint: Checkpoint) -> dict[str, Tensor]:
    names = [n for n in checkpoint.manifest.tensors if n.split("/")[0] in ("model", "optimizer")]
    return checkpoint.read(names)


def test_every_holder_wrote_its_part_and_each_tensor_is_there_once(whole: Path) -> None:
    assert {3, 8} <= {c.manifest.position.step for c in checkpoints_in(whole)} <= {3, 6, 8}
    manifest = at(whole, 8).manifest
    assert [s.device for s in manifest.shards] == ["lab/a", "lab/b", "lab/c", "lab/d"]
    written = {s.device: {n for n in s.tensors if n.startswith("model/")} for s in manifest.shards}
    assert "model/one.weight" in written["lab/b"] and "model/two.weight" in written["lab/c"]
    assert "model/embed.weight" in written["lab/a"] | written["lab/d"] and "model/unused" in written["lab/a"]
    every = [n for names in written.values() for n in names]
    assert len(every) == len(set(every)) and "model/head.weight" not in every
    assert {"optimizer/one.weight/exp_avg", "optimizer/one.weight/step"} <= set(manifest.tensors)
    assert manifest.position.samples_seen == 6 * 4 + 3 + 6 * 3 and manifest.position.dataset_size == 27


PLANS = pytest.mark.parametrize(
    "plan", [ONE, TWO, THREE], ids=["one device", "two, data parallel", "three, hybrid"]
)


@PLANS
def test_what_is_restored_is_bit_for_bit_what_was_saved(whole: Path, tmp_path: Path, plan: Plan) -> None:
    """The other plan takes one step that has no weight, so that nothing moves, and saves."""
    saved = at(whole, 3)
    launch(request_for(tmp_path, plan, steps=4, every=100, resume=saved.path, options=WEIGHTLESS))
    expected, found = state(saved), state(at(tmp_path, 4))
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.fixture(scope="module")
def smooth(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same without BatchNorm, whose statistics depend on how a batch is cut."""
    folder = tmp_path_factory.mktemp("runs") / "smooth"
    launch(request_for(folder, FOUR, steps=12, every=5, norm="LayerNorm(8)"))
    return folder


@PLANS
def test_the_curve_is_that_of_the_undisturbed_run(smooth: Path, tmp_path: Path, plan: Plan) -> None:
    """Across the end of an epoch, with a clip norm, dropout and a learning rate that falls, in float64."""
    saved = at(smooth, 5)
    launch(request_for(tmp_path, plan, steps=12, every=100, resume=saved.path, norm="LayerNorm(8)"))
    before, after = losses(smooth), losses(tmp_path)
    assert sorted(after) == list(range(5, 12))
    assert after[5] == pytest.approx(before[5], rel=1e-14)
    assert after == pytest.approx({n: before[n] for n in after}, rel=1e-11)
    expected, found = state(at(smooth, 12)), state(at(tmp_path, 12))
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert torch.allclose(found[name], tensor, rtol=1e-9, atol=1e-12), name


def test_the_same_plan_goes_on_bit_for_bit_with_its_generators_and_statistics(tmp_path: Path) -> None:
    """BatchNorm and dropout by device: each goes on with its own statistics and its own random numbers."""
    by_device = {"options": "", "split_free": False, "evaluate": False}  # an evaluation averages statistics
    launch(request_for(tmp_path / "whole", TWO, steps=7, every=3, **by_device))
    saved = at(tmp_path / "whole", 3)
    assert "statistics/lab/b/norm.running_mean" in saved.manifest.tensors
    launch(request_for(tmp_path / "on", TWO, steps=7, every=100, resume=saved.path, **by_device))
    before, after = losses(tmp_path / "whole"), losses(tmp_path / "on")
    assert after == {n: before[n] for n in after} and len(after) == 4
    first, second = (at(tmp_path / run, 7) for run in ("whole", "on"))
    names = [n for n in first.manifest.tensors if not n.startswith("rng/")]
    expected, found = first.read(names), second.read(names)
    assert all(torch.equal(found[n], expected[n]) for n in names)


def test_statistics_by_device_become_their_mean_elsewhere(tmp_path: Path) -> None:
    """Weighted by samples, 4 and 2 of 6, as before evaluation."""
    launch(request_for(tmp_path / "two", TWO, steps=2, every=2, options=""))
    saved = at(tmp_path / "two", 2)
    one = plan_of((6, 6, (stage("(root) embed one norm two drop head", (D, 6)),)))
    launch(request_for(tmp_path / "one", one, steps=3, every=9, resume=saved.path, options=WEIGHTLESS))
    key = "norm.running_var"
    parts = saved.read([f"statistics/lab/{d}/{key}" for d in "ab"])
    mean = (4 * parts[f"statistics/lab/a/{key}"] + 2 * parts[f"statistics/lab/b/{key}"]) / 6
    found = at(tmp_path / "one", 3).read([f"model/{key}"])[f"model/{key}"]
    assert torch.allclose(found, mean, rtol=1e-14) and not torch.equal(*parts.values())


def test_one_command_begins_a_run_and_takes_it_up_again(tmp_path: Path) -> None:
    """--resume latest in the run's own folder: from the beginning, then from where it was; one curve."""
    wishes = {"every": 2, "resume": "latest", "norm": "LayerNorm(8)"}
    first = launch(request_for(tmp_path / "run", TWO, steps=5, **wishes))
    assert any("starts from the beginning" in d for d in first.decisions)
    assert sorted(losses(tmp_path / "run")) == [0, 1, 2, 3, 4]
    newest = checkpoints_in(tmp_path / "run")[0]
    assert newest.manifest.position.step == 5
    shard = newest.path / newest.manifest.shards[0].file
    shard.write_bytes(shard.read_bytes()[:-10])
    second = launch(request_for(tmp_path / "run", TWO, steps=7, **wishes))
    assert any("passed over samples-" in d and "truncated" in d for d in second.decisions)
    assert any("taken up at step 2, 12" in d or "taken up at step 4, 24" in d for d in second.decisions)
    assert sorted(losses(tmp_path / "run")) == [0, 1, 2, 3, 4, 5, 6]
    assert {2, 7} <= {c.manifest.position.step for c in checkpoints_in(tmp_path / "run")}
    assert newest_good(tmp_path / "run")[1] == ()
    launch(request_for(tmp_path / "whole", ONE, steps=7, norm="LayerNorm(8)"))
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "whole"), rel=1e-11)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"norm": "BatchNorm1d(4, affine=False)"}, StateError, "norm.bias is only in the checkpoint"),
        ({"optimizer": "SGD(p, lr=0.1)"}, StateError, "AdamW there, SGD here"),
        ({"seed": 5}, StateError, "seed 0 there, 5 here"),
        ({"steps": 8}, UsageError, "samples seen: 45, end at 45"),
        ({"resume": "nowhere"}, UsageError, "nowhere has no checkpoint"),
    ],
)
def test_what_does_not_belong_together_is_refused(whole: Path, tmp_path: Path, change, error, words) -> None:
    wishes = {"steps": 12, "resume": at(whole, 8).path} | change
    with pytest.raises(error) as caught:
        launch(request_for(tmp_path, ONE, **wishes))
    assert words in caught.value.render()


def test_a_damaged_checkpoint_that_is_asked_for_by_name_is_refused(whole: Path, tmp_path: Path) -> None:
    good = at(whole, 3)
    damaged = tmp_path / "checkpoints" / good.path.name
    shutil.copytree(good.path, damaged)
    shard = damaged / good.manifest.shards[1].file
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    shard.write_bytes(raw)
    with pytest.raises(StateError, match=shard.name):
        launch(request_for(tmp_path, TWO, steps=9, resume=damaged))


def test_a_disk_that_fills_up_ends_no_run(tmp_path: Path) -> None:
    """A small file system in memory: the first checkpoint fits, later ones do not; the half is removed."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=88k", "tmpfs", str(folder)]).returncode:
        pytest.skip("no right to mount a file system")
    try:
        outcome = launch(request_for(tmp_path, TWO, steps=7, every=2, options=""))
        said = [d for d in outcome.decisions if d.startswith("no checkpoint of")]
        assert said and all("No space left on device" in d for d in said)
        assert said[-1].startswith("no checkpoint of 39 samples") and said[-1].endswith(
            "the training goes on"
        )
        failed = f"{counted(len(said), 'checkpoint')} could not be saved in {folder}, the last: lab/"
        assert any(d.startswith(failed) for d in outcome.decisions)
        assert newest_good(tmp_path)[0].manifest.position.step == 2
        assert not [p.name for p in folder.iterdir() if p.name.startswith(".")]
        assert len(losses(tmp_path)) == 7
    finally:
        subprocess.run(["umount", str(folder)], check=True)
