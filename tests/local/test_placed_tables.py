"""Placed tables under whole runs: data parallel, pipelines and hybrids, in a file, never in one piece."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file

from evener.core.files import read
from evener.core.fleet import Fleet
from evener.core.plan import Pipeline, Plan, Share, Stage
from evener.errors import DataError, NoPlanFitsError, UsageError
from evener.report.metrics import read_metrics
from evener.runtime.checkpoints.folder import checkpoints_in
from evener.runtime.tables.rows import initial_rows
from evener.session.checkpoints.save_rule import Keep, rule_of
from evener.session.drop_in.checkpoints import load_checkpoint
from evener.session.exactness.verify import verify
from evener.session.launching.launch import launch
from evener.session.recipe import load_recipe
from evener.session.request import Request
from tests.architecture.source import ROOT

A, B, C = "lab1/a", "lab1/b", "lab1/c"
TABLES, HEAD = ("word", "goods"), ("head",)
SCRIPT = """
import torch
from torch import nn
import evener as ev

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.word = nn.Embedding(50, 4{device})
        self.goods = nn.EmbeddingBag(30, 4, mode="mean", padding_idx=0)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(torch.tanh(torch.cat([self.word(x[:, 0]), self.goods(x[:, 1:])], 1)))

def recipe():
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(0, {highest}, (64, 1), generator=generator)
    x = torch.cat([words, torch.randint(0, 30, (64, 3), generator=generator)], 1)
    data = list(zip(x, torch.randint(0, 3, (64,), generator=generator)))
    return ev.Recipe(
        model=Model(), dataset=data, heldout=data[:20], loss=nn.CrossEntropyLoss(), global_batch=12,
        optimizer=lambda p: torch.optim.Adam(p, lr=0.01), max_norm=0.1, place={place},
    )
"""


def stage(layers: tuple[str, ...], device: str, samples: int, **more: Any) -> Stage:
    return Stage(layers=layers, shares=(Share(devices=(device,), samples=samples),), **more)


def uneven(*sizes: int) -> Plan:
    """Data parallel in micro-batches of two."""
    pipelines = tuple(
        Pipeline(samples=n, micro_batch=2, stages=(stage(TABLES + HEAD, d, 2),))
        for d, n in zip((A, B, C), sizes, strict=False)
    )
    return Plan(global_batch=sum(sizes), pipelines=pipelines)


def piped(schedule: str) -> Plan:
    stages = (stage(TABLES, A, 3), stage(HEAD, B, 3))
    return Plan(
        global_batch=12, schedule=schedule, pipelines=(Pipeline(samples=12, micro_batch=3, stages=stages),)
    )


HYBRID = Plan(
    global_batch=12,
    schedule="1f1b",
    pipelines=(
        Pipeline(samples=8, micro_batch=2, stages=(stage(TABLES, A, 2), stage(HEAD, B, 2))),
        Pipeline(samples=4, micro_batch=4, stages=(stage(TABLES + HEAD, C, 4, recompute=True),)),
    ),
)
CPU = dict.fromkeys(TABLES, "cpu")
PARTS = {"word": {A: 5, B: 3}, "goods": {B: 1}}


def request(folder: Path, plan: Plan, place: dict, device: str = "", highest: int = 50) -> Request:
    script = folder / "job.py"
    script.write_text(SCRIPT.format(place=place, device=device, highest=highest), encoding="utf-8")
    fleet = read(ROOT / "examples" / "fleets" / "8-4-2-2.json", Fleet)
    return Request(
        script=str(script),
        fleet=fleet.only(plan.devices),
        run_dir=str(folder),
        plan=plan,
        steps=3,
        quiet=True,
    )


@pytest.mark.parametrize(
    ("plan", "place"),
    [
        (uneven(12), CPU | {"(loss)": "cpu"}),
        (uneven(7, 5), CPU),
        (uneven(7, 5), PARTS),
        (piped("zero-bubble"), CPU),
        (HYBRID, CPU),
    ],
    ids=["one device", "uneven", "parts by device", "zero-bubble", "hybrid"],
)
def test_a_run_with_placed_tables_is_exact(tmp_path: Path, plan: Plan, place: dict) -> None:
    found = verify(request(tmp_path, plan, place))
    assert found is not None
    assert found.exact, found
    assert found.parameter_error_float64 <= 1e-10


@pytest.mark.parametrize("plan", [piped("1f1b"), HYBRID], ids=["pipeline", "hybrid"])
def test_what_the_planner_chooses_is_exact_in_stages_as_well(tmp_path: Path, plan: Plan) -> None:
    found = verify(replace(request(tmp_path, plan, {"word": "auto", "goods": "cpu"}), steps=2))
    assert found is not None
    assert found.exact, found
    word, goods = sorted(found.plan.tables, key=lambda t: t.table, reverse=True)
    assert "rows a step (measured)" in word.why and word.residence in ("cpu", "dense")
    assert (goods.why, goods.residence, sum(goods.rows.values())) == ("as asked", "cpu", 30)


def test_a_run_with_a_table_in_a_file_learns_the_same(tmp_path: Path) -> None:
    ends = []
    for name, word in (("memory", "cpu"), ("file", {"file": str(tmp_path / "rows"), "rows": 20})):
        (tmp_path / name).mkdir()
        ends.append(launch(request(tmp_path / name, uneven(12), {"word": word, "goods": "cpu"})))
    assert ends[0].heldout_loss == pytest.approx(ends[1].heldout_loss, rel=1e-6)
    (word,) = ends[1].lookups["word"]
    assert word.ids == 3 * 12 and word.rows <= word.ids
    assert sum(word.found_in.values()) == word.rows
    assert 0 < word.hit_rates["host"] < 1
    records = read_metrics(tmp_path / "file" / "metrics.jsonl").records
    assert [r.tables["word"].ids for r in records] == [12, 12, 12]
    assert all(not told.found_in for told in ends[0].lookups["word"])


def test_the_file_of_a_table_has_what_the_run_ended_with_and_a_next_run_goes_on(tmp_path: Path) -> None:
    """The last rows of a run were written down only when the log was full: the next run lost them."""
    place = {"word": {"file": str(tmp_path / "rows"), "rows": 20}, "goods": "cpu"}
    for steps in (3, 6):
        launch(request(tmp_path, uneven(12), place))
        (folder,) = (tmp_path / "rows").glob("*/*")
        assert (folder / "step").read_text() == str(steps)
        end = load_file(tmp_path / "model.safetensors")["word.weight"]
        held = np.fromfile(folder / "rows", "<f4").reshape(50, -1)
        assert (held[:, :4] == end.numpy()).all()


def test_a_table_that_no_device_ever_has_whole_is_saved_in_parts(tmp_path: Path) -> None:
    place = {"word": {A: 5, B: 3}, "goods": "cpu"}
    launch(replace(request(tmp_path, uneven(7, 5), place, ', device="meta"'), seed=5))
    parts = [load_file(tmp_path / f"table-word-{rows}.safetensors") for rows in ("0-31", "31-50")]
    whole = torch.cat([p["word.weight"] for p in parts])
    assert whole.shape == (50, 4)
    assert 0 < float((whole - initial_rows(0, 50, 4, 5)).abs().max()) < 0.1
    assert "word.weight" not in load_file(tmp_path / "model.safetensors")


def test_an_id_that_the_table_does_not_have(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the table word has no row"):
        launch(request(tmp_path, uneven(7, 5), CPU, highest=90))


def test_a_table_larger_than_all_memory_together(tmp_path: Path) -> None:
    wanted = request(tmp_path, uneven(7, 5), CPU, ', device="meta"')
    script = Path(wanted.script)
    script.write_text(script.read_text().replace("Embedding(50,", "Embedding(10**12,"), encoding="utf-8")
    with pytest.raises(NoPlanFitsError, match="word is larger than all memory") as caught:
        launch(wanted)
    assert caught.value.numbers == "14.6 TiB of weights alone; lab1/a 8 GiB, lab1/b 8 GiB: 16 GiB in all"


def test_a_place_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="place of word is 'gpu'"):
        launch(request(tmp_path, uneven(12), {"word": "gpu"}))


def saved_run(folder: Path, plan: Plan, place: dict, steps: int, **more: Any) -> dict[str, torch.Tensor]:
    """The parameters after `steps` steps in float64, with a checkpoint before the fourth."""
    folder.mkdir(exist_ok=True)
    wanted = replace(request(folder, plan, place), steps=steps, dtype="float64", evaluate=False, **more)
    launch(wanted)
    return load_file(folder / "model.safetensors")


ELSEWHERE = pytest.mark.parametrize(
    ("plan", "place"),
    [
        (uneven(12), CPU),
        (uneven(5, 4, 3), PARTS | {"goods": "cpu"}),
        (piped("1f1b"), CPU),
        (uneven(7, 5), {}),
    ],
    ids=["one device", "three", "pipeline", "dense"],
)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """Six steps with tables in unequal parts on two devices, saved before the fourth."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    ends = saved_run(folder, uneven(7, 5), PARTS, 6, checkpoint=rule_of("3", Keep(last=3)))
    return folder, ends


@ELSEWHERE
def test_tables_go_on_from_a_checkpoint_anywhere(
    undisturbed: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, plan: Plan, place: dict
) -> None:
    folder, ends = undisturbed
    (third,) = [c.path for c in checkpoints_in(folder) if c.manifest.position.step == 3]
    found = saved_run(tmp_path, plan, place, 6, resume=str(third))
    for name, tensor in ends.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-10, msg=name)


def test_a_dense_checkpoint_goes_on_with_tables_in_parts_and_in_plain_pytorch(
    undisturbed: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    folder, ends = undisturbed
    dense = tmp_path / "dense"
    saved_run(dense, uneven(12), {}, 4, checkpoint=rule_of("3", Keep(last=3)))
    (third,) = [c for c in checkpoints_in(dense) if c.manifest.position.step == 3]
    found = saved_run(tmp_path / "parts", uneven(7, 5), PARTS, 6, resume=str(third.path))
    for name, tensor in ends.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-10, msg=name)
    (ours,) = [c for c in checkpoints_in(folder) if c.manifest.position.step == 3]
    assert set(ours.manifest.wholes) - set(third.manifest.wholes) == {
        n for n in ours.manifest.tensors if n.startswith("rng/lab1/b")
    }
    assert ours.manifest.model_id == third.manifest.model_id
    models = [load_recipe(str(folder / "job.py"), 0).model.double() for _ in range(2)]
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in models]
    for checkpoint, model, optimizer in zip((ours, third), models, optimizers, strict=True):
        load_checkpoint(checkpoint.path, model, optimizer)
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-10)
        for key, value in optimizers[1].state[q].items():
            torch.testing.assert_close(optimizers[0].state[p][key], value, rtol=0, atol=1e-10)


@pytest.mark.parametrize("plan", [uneven(12), uneven(7, 5)], ids=["one device", "two"])
def test_a_table_in_a_file_is_saved_and_goes_on_from_any_checkpoint(
    undisturbed: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, plan: Plan
) -> None:
    """From parts in memory into files; from files on, in memory, in the model and in plain PyTorch."""
    folder, ends = undisturbed
    (third,) = [c.path for c in checkpoints_in(folder) if c.manifest.position.step == 3]

    def file(name: str) -> dict:
        return {"word": {"file": str(tmp_path / name), "rows": 20, "hot": 14}, "goods": "cpu"}

    rule = rule_of("1", Keep(last=9))
    runs = [saved_run(tmp_path / "file", plan, file("rows"), 6, resume=str(third), checkpoint=rule)]
    saved = {c.manifest.position.step: c.path for c in checkpoints_in(tmp_path / "file")}
    assert {4, 6} <= set(saved)
    for number, where in enumerate((file("other rows"), PARTS, {})):
        runs.append(saved_run(tmp_path / str(number), uneven(7, 5), where, 6, resume=str(saved[4])))
    for found in runs:
        for name, tensor in ends.items():
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-10, msg=name)
    model = load_recipe(str(folder / "job.py"), 0).model.double()
    load_checkpoint(saved[6], model, torch.optim.Adam(model.parameters(), lr=0.01))
    torch.testing.assert_close(model.word.weight.detach(), ends["word.weight"], rtol=0, atol=1e-10)
