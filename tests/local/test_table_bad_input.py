"""What is wrong with ids, disks and processes under placed tables, met by whole runs."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file
from torch import nn

import evener as ev
from evener.core.plan import Pipeline, Plan
from evener.errors import DataError, EnvironmentBrokenError, EvenerError
from evener.runtime.checkpoints.folder import newest_good
from evener.runtime.tables.optimizers import TableAdam
from evener.runtime.tables.table import Part, Table
from evener.runtime.tables.tiered import TieredRows
from evener.session.checkpoints.save_rule import Keep, rule_of
from evener.session.exactness.verify import verify
from evener.session.launching.launch import launch
from evener.session.request import Request
from tests.local.device.test_job import fleet
from tests.local.test_placed_tables import CPU, HEAD, TABLES, request, stage, uneven

WORDS = "words = torch.randint(0, 50, (64, 1), generator=generator)"


def changed(wanted: Request, old: str, new: str) -> Request:
    """The same request, of a script in which something else stands."""
    script = Path(wanted.script)
    text = script.read_text(encoding="utf-8")
    assert text.count(old) == 1, old
    script.write_text(text.replace(old, new), encoding="utf-8")
    return wanted


def on_card(folder: Path) -> Request:
    """The job on a rehearsed accelerator, rows sent ahead."""
    cards = fleet()
    name = cards.devices[0].name
    plan = Plan(
        global_batch=12,
        pipelines=(Pipeline(samples=12, micro_batch=4, stages=(stage(TABLES + HEAD, name, 4),)),),
    )
    wanted = request(folder, uneven(12), CPU)
    return replace(wanted, fleet=cards.only(plan.devices), plan=plan, rehearse=True)


WHERE = {
    "one cpu": lambda folder: request(folder, uneven(12), CPU),
    "two cpus": lambda folder: request(folder, uneven(7, 5), CPU),
    "accelerator": on_card,
}
BAD = {
    "too large": (WORDS + "; words[:] = 77", r"the table word has no row 77, which sample \d"),
    "negative": (WORDS + "; words[40:] = -3", r"the table word has no row -3, which sample \d"),
    "floats": (WORDS.replace("words =", "words = 1.0 *"), "the table word was given ids of float32"),
}


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("bad", BAD)
def test_ids_that_no_table_has(tmp_path: Path, where: str, bad: str) -> None:
    new, said = BAD[bad]
    wanted = changed(WHERE[where](tmp_path), WORDS, new)
    if bad == "floats":  # x would be of floats as a whole: goods stay whole numbers
        changed(wanted, "self.goods(x[:, 1:])", "self.goods(x[:, 1:].long())")
    with pytest.raises(DataError, match=said):
        launch(wanted)


def test_a_device_without_a_sample_in_a_smaller_batch(tmp_path: Path) -> None:
    """The last batch of an epoch has 4 samples of 12: a device with one of twelve gets none of them."""
    found = verify(replace(request(tmp_path, uneven(11, 1), CPU), steps=7))
    assert found is not None and found.exact, found
    assert found.parameter_error_float64 <= 1e-10


LARGE = "nn.Embedding(5000, 4"
MANY = "words = torch.randint(0, 5000, (4096, 1), generator=generator)"


def in_a_file(folder: Path, steps: int, first: str = "") -> Request:
    """A table of 5,000 rows of which 600 are in memory; most of the 480 words of a step are in the file."""
    stages = (stage(TABLES + HEAD, "lab1/a", 480),)
    plan = Plan(global_batch=480, pipelines=(Pipeline(samples=480, micro_batch=480, stages=stages),))
    place: dict[str, Any] = {"word": {"file": str(folder / "rows"), "rows": 600}, "goods": "cpu"}
    run = folder / f"run-{steps}-{len(first)}"
    run.mkdir()
    wanted = replace(request(run, plan, place), steps=steps, evaluate=False)
    changed(wanted, "nn.Embedding(50, 4", LARGE)
    changed(wanted, WORDS, MANY)
    changed(wanted, "torch.randint(0, 30, (64, 3)", "torch.randint(0, 30, (4096, 3)")
    changed(wanted, "torch.randint(0, 3, (64,)", "torch.randint(0, 3, (4096,)")
    changed(wanted, "global_batch=12", "global_batch=480")
    changed(wanted, "max_norm=0.1, ", "")
    return changed(wanted, "def recipe():\n", f"def recipe():\n    torch.manual_seed(0)\n{first}")


def held(folder: Path) -> tuple[int, torch.Tensor]:
    """(step, all rows as of it) of the table in the file, as the next run would read them."""
    (place,) = (folder / "rows").iterdir()
    rows = TieredRows(place, 5000, lambda a, b: torch.zeros(b - a, 4), host=5000)
    table = Table("word", 5000, 4, Part(0, 5000, rows))
    table.use(TableAdam())
    found = rows.file.step, table.own(torch.arange(5000))
    rows.close()
    return found


FULL = """    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (280_000, 280_000))
"""


def test_a_disk_that_is_full_loses_no_row(tmp_path: Path) -> None:
    """No file may grow beyond 280 kB: the rows are 260 kB, what is logged of them would be more."""
    launch(in_a_file(tmp_path, 3))
    before = held(tmp_path)
    assert before[0] == 3
    with pytest.raises(EnvironmentBrokenError, match="cannot be written: File too large") as caught:
        launch(changed(in_a_file(tmp_path, 40, FULL), "'rows': 600", "'rows': 1500"))
    assert "what was committed last, step 3, is there in full" in caught.value.numbers
    after = held(tmp_path)
    assert after[0] == 3
    assert torch.equal(before[1], after[1])


def test_a_disk_that_checkpoints_fill_under_the_table_ends_no_run(tmp_path: Path) -> None:
    """Rows, log and checkpoints share 1,050 kB: rows are 260, the log is up to 372, a checkpoint 240."""
    straight, disk = in_a_file(tmp_path, 12), tmp_path / "disk"
    launch(straight)
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1050k", "tmpfs", str(disk)]).returncode:
        pytest.skip("no right to mount a file system")
    try:
        wanted = replace(in_a_file(disk, 3), checkpoint=rule_of("3", Keep(last=9)))
        assert not [d for d in launch(wanted).decisions if d.startswith("no checkpoint of")]
        outcome = launch(replace(wanted, steps=12, resume="latest"))
        said = [d for d in outcome.decisions if d.startswith("no checkpoint of")]
        assert said and all("needs the rest of its disk" in d for d in said)
        run = Path(wanted.run_dir)
        found, damaged = newest_good(run)
        assert found.manifest.position.step == 3 and not damaged
        assert not [p.name for p in (run / "checkpoints").iterdir() if p.name.startswith(".")]
        assert held(disk)[0] == held(tmp_path)[0] == 12
        torch.testing.assert_close(held(disk)[1], held(tmp_path)[1], rtol=0, atol=1e-6)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


KILLED = """    import os, signal
    from evener.runtime.tables.coldfile import ColdFile
    whole = ColdFile.{name}
    done = []
    def dying(self, *args):
        done.append(1)
        if len(done) == {times}:
            {before}
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(self, *args)
    ColdFile.{name} = dying
"""
HALF = "self._log.write(b'x' * 1000); self._log.flush()"


@pytest.mark.parametrize(
    ("name", "times", "before"),
    [("write", 20, HALF), ("_apply", 3, "pass"), ("commit", 3, "pass")],
    ids=["in the log", "in the rows", "before the log's end"],
)
def test_a_process_killed_while_it_writes_back(tmp_path: Path, name: str, times: int, before: str) -> None:
    """What is left is the table as of the step that the file names, as a run of so many steps ends."""
    first = KILLED.format(name=name, times=times, before=before)
    with pytest.raises(EvenerError, match="lab1/a") as caught:
        launch(in_a_file(tmp_path, 40, first))
    assert "SIGKILL" in str(caught.value) or "killed" in str(caught.value)
    step, rows = held(tmp_path)
    assert step > 0
    wanted = in_a_file(tmp_path, step, "    # nobody dies\n")
    shutil.rmtree(tmp_path / "rows")
    launch(wanted)
    end = load_file(Path(wanted.run_dir) / "model.safetensors")["word.weight"]
    torch.testing.assert_close(rows, end, rtol=0, atol=1e-6)
    assert torch.equal(held(tmp_path)[1], end)


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        (torch.full((24, 1), 81), "the table emb has no row 81, which sample 0"),
        (torch.full((24, 1), -3), "the table emb has no row -3, which sample 0"),
        (torch.full((24, 1), 0.5), "the table emb was given ids of float32"),
    ],
    ids=["too large", "negative", "floats"],
)
def test_ids_that_no_table_has_by_ev_train(tmp_path: Path, ids: torch.Tensor, said: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb, self.head = nn.Embedding(50, 4), nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.emb(x[:, 0]))

    model = Model()
    recipe = ev.Recipe(
        model=model,
        dataset=list(zip(ids, torch.zeros(24, dtype=torch.int64), strict=True)),
        loss=nn.CrossEntropyLoss(),
        global_batch=12,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        place={"emb": "cpu"},
    )
    with pytest.raises(DataError, match=said):
        ev.train(recipe, steps=2, run_dir=tmp_path, quiet=True)
    assert isinstance(model.emb, nn.Embedding), "the user's layer is back"
