"""`ev.train` saves and goes on, in the user's own process."""

from pathlib import Path

import pytest
import torch
from torch import nn

import evener as ev
from evener.core.fleet import Device, Fleet
from evener.report.metrics import read_metrics
from tests.local.checkpoint_jobs import plan_of
from tests.local.plans import stage

HERE = Fleet(devices=(Device(name="lab/a", kind="cpu", threads=1),))
PLAN = plan_of((4, 4, (stage("0 1", ("lab/a", 4)),)))


def recipe() -> ev.Recipe:
    torch.manual_seed(0)
    data = [(torch.full((3,), i / 20), torch.tensor([1.0])) for i in range(20)]
    return ev.Recipe(
        model=nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)),
        dataset=data,
        loss=nn.MSELoss(),
        optimizer=lambda p: torch.optim.AdamW(p, lr=0.1),
        global_batch=4,
    )


def test_a_run_that_goes_on_ends_with_the_same_bits(tmp_path: Path) -> None:
    wishes = {"fleet": HERE, "plan": PLAN, "quiet": True}
    whole, first, second = recipe(), recipe(), recipe()
    ev.train(whole, steps=8, run_dir=tmp_path / "whole", **wishes)
    saving = {"checkpoint_every": "1h", "run_dir": tmp_path / "run", "resume": "latest"}
    ev.train(first, steps=5, **saving, **wishes)
    ev.train(second, steps=8, **saving, **wishes)
    assert all(map(torch.equal, whole.model.state_dict().values(), second.model.state_dict().values()))
    losses = [
        [r.loss for r in read_metrics(tmp_path / d / "metrics.jsonl").records] for d in ("whole", "run")
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 8
    with pytest.raises(ev.EvenerError, match="is where this run is to end"):
        ev.train(recipe(), steps=8, **saving, **wishes)
    unsaved = ev.train(recipe(), steps=9, run_dir=tmp_path / "run", resume="latest", **wishes)
    assert any("this run saves no checkpoint" in told for told in unsaved.decisions)


def test_tables_that_are_placed_apart_go_on(tmp_path: Path) -> None:
    def made() -> ev.Recipe:
        torch.manual_seed(0)
        return ev.Recipe(
            model=nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 1)),
            dataset=[(torch.tensor(i % 3), torch.tensor([1.0])) for i in range(20)],
            loss=nn.MSELoss(),
            optimizer=lambda p: torch.optim.Adam(p, lr=0.1),
            global_batch=4,
            place={"0": "cpu"},
        )

    wishes = {"fleet": HERE, "plan": PLAN, "quiet": True}
    ends = []
    for folder, steps, resume in (("whole", 6, None), ("run", 3, None), ("run", 6, "latest")):
        job = made()
        ev.train(job, steps=steps, run_dir=tmp_path / folder, checkpoint_every=3, resume=resume, **wishes)
        ends.append(job.model[0].weight.detach())
    assert torch.equal(ends[2], ends[0]) and not torch.equal(ends[1], ends[0])


def test_what_is_wrong_with_a_checkpoint_is_told_before_anything_is_measured(tmp_path: Path) -> None:
    run = tmp_path / "run"
    ev.train(recipe(), steps=3, fleet=HERE, plan=PLAN, quiet=True, run_dir=run, checkpoint_every="1h")
    with pytest.raises(ev.EvenerError, match="is where this run is to end"):
        ev.train(recipe(), steps=3, fleet=HERE, quiet=True, run_dir=run, resume="latest")
    with pytest.raises(ev.EvenerError, match="in another order"):
        ev.train(recipe(), steps=9, fleet=HERE, quiet=True, run_dir=run, resume="latest", seed=3)
    with pytest.raises(ev.EvenerError, match="has no checkpoint"):
        ev.train(recipe(), steps=9, fleet=HERE, quiet=True, run_dir=tmp_path / "new", resume=tmp_path / "no")
    assert not (run / "profile.json").exists() and not (tmp_path / "new" / "profile.json").exists()


def test_a_run_that_begins_anew_for_want_of_a_checkpoint_keeps_no_old_steps(tmp_path: Path) -> None:
    wishes = {"fleet": HERE, "plan": PLAN, "quiet": True, "run_dir": tmp_path}
    ev.train(recipe(), steps=7, **wishes)
    with pytest.raises(ev.EvenerError, match="holds another run"):
        ev.train(recipe(), steps=2, **wishes)
    ev.train(recipe(), steps=2, resume="latest", **wishes)
    assert [r.step for r in read_metrics(tmp_path / "metrics.jsonl").records] == [0, 1]


def test_where_a_run_is_taken_up_is_told_before_its_first_step(tmp_path: Path, capsys) -> None:
    wishes = {"fleet": HERE, "plan": PLAN, "run_dir": tmp_path, "checkpoint_every": "1h", "resume": "latest"}
    ev.train(recipe(), steps=3, quiet=True, **wishes)
    ev.train(recipe(), steps=5, **wishes)
    told = capsys.readouterr().err
    assert 0 < told.index("taken up at step 3") < told.index("step 4/")
