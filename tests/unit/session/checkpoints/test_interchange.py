"""Checkpoints go to torch.distributed.checkpoint and come from it bit for bit, under the names of others."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from evener.cli.main import main
from evener.errors import FileError, StateError, UsageError
from evener.runtime.checkpoints.dcp_reading import Part, Stored
from evener.runtime.checkpoints.files import Disk
from evener.runtime.checkpoints.folder import FOLDER, Checkpoint, checkpoints_in, commit, partial_of
from evener.runtime.checkpoints.manifest import FORMAT, Manifest, Position, model_id
from evener.runtime.checkpoints.rows import part_name
from evener.runtime.checkpoints.shards import write_shard
from evener.runtime.checkpoints.values import joined, piece_name
from evener.session.checkpoints import to_dcp
from evener.session.checkpoints.from_dcp import _to_write, import_dcp
from evener.session.checkpoints.to_dcp import export_dcp
from evener.session.drop_in.checkpoints import load_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
WORDS = torch.tensor([1, 2, 5])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(7, 4), nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.embed(ids)))


def trained(steps: int = 2, kind: Any = torch.optim.AdamW) -> tuple[Net, torch.optim.Optimizer]:
    model = Net()
    optimizer = kind(model.parameters(), lr=0.1)
    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad()
    loss = model(WORDS).square().sum()
    loss.backward()
    optimizer.step()
    return loss.item()


def saved(folder: Path, layout: str = "plain") -> tuple[Net, torch.optim.Optimizer]:
    """What others would have written."""
    model, optimizer = trained()
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    states, kept = get_state_dict(model, optimizer, options=flat if layout == "titan" else None)
    more = {"train_state": {"step": torch.tensor(3)}, "lr_scheduler": {"last": 3}}
    written = {
        "plain": {"model": states, "optim": kept},
        "app": {"app": {"model": states, "optim": kept}},
        "titan": {**states, "optimizer": kept, **more},
        "lightning": {"state_dict": states, "optimizer_0": kept},
        "ema": {"model": states, "optim": kept, "ema": {"x": torch.ones(2)}},
    }[layout]
    dcp.save(written, checkpoint_id=folder, no_dist=True)
    return model, optimizer


@pytest.mark.parametrize("layout", ["plain", "app", "titan", "lightning", "ema"])
def test_what_others_wrote_goes_on_bit_for_bit_and_back(tmp_path: Path, layout: str) -> None:
    model, optimizer = saved(tmp_path / "theirs", layout)
    moved = import_dcp(tmp_path / "theirs", tmp_path / "run", "AdamW")
    assert ("ema.x" in moved.left) == (layout == "ema") and any("param_groups" in n for n in moved.left)
    other, fresh = trained(0)
    position = load_checkpoint(tmp_path / "run", other, fresh)
    assert (position.step, position.samples_seen) == (0, 0)
    exported = export_dcp(tmp_path / "run", tmp_path / "back")
    assert exported.left == ("position",) and exported.num_bytes == moved.num_bytes
    third, new = trained(0)
    states, kept = get_state_dict(third, new)
    found = {"model": states, "optim": {"state": kept["state"]}}
    dcp.load(found, checkpoint_id=tmp_path / "back", no_dist=True)
    set_state_dict(third, new, model_state_dict=states, optim_state_dict=kept)
    losses = {step(*pair) for pair in ((model, optimizer), (other, fresh), (third, new))}
    assert len(losses) == 1
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]) and torch.equal(tensor, third.state_dict()[name])


def test_other_values_under_a_tied_name_are_another_model(tmp_path: Path) -> None:
    model, _ = trained()
    states = {**model.state_dict(), "head.weight": torch.zeros(7, 4)}
    dcp.save({"model": states}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    moved = import_dcp(tmp_path / "theirs", tmp_path / "run")
    assert moved.num_tensors == len(states)
    with pytest.raises(StateError, match="another model") as e:
        load_checkpoint(tmp_path / "run", Net())
    assert "head.weight is only in the checkpoint" in e.value.numbers


def cut(run: Path) -> Checkpoint:
    """A checkpoint of two owners, of a table's rows, a number, and statistics of each device's own."""
    weight, table = torch.randn(10, 4), torch.randn(5, 2)
    parts = {
        "lab/a": {
            piece_name("model/w", (10, 4), 0, 21): weight.view(-1)[:21],
            part_name("model/emb.weight", 0, 3): table[:3].clone(),
            "optimizer/w/count:int": torch.tensor(5),
            "model/norm.running_mean": torch.ones(2),
            "statistics/lab/a/norm.running_mean": torch.ones(2),
            "rng/lab/a/torch": torch.zeros(3, dtype=torch.uint8),
        },
        "lab/b": {
            piece_name("model/w", (10, 4), 21, 40): weight.view(-1)[21:].clone(),
            part_name("model/emb.weight", 3, 5): table[3:].clone(),
            "statistics/lab/b/norm.running_mean": torch.full((2,), 5.0),
        },
    }
    partial = run / FOLDER / partial_of(8, "token")
    Disk().make_folder(partial)
    shards = tuple(
        write_shard(
            Disk(),
            partial / f"shard-{i:05d}-of-00002.safetensors",
            held,
            device,
            {"norm.running_mean": [0.75, 0.25][i - 1]},
        )
        for i, (device, held) in enumerate(parts.items(), 1)
    )
    tensors = {n: t for shard in shards for n, t in shard.tensors.items()}
    manifest = Manifest(
        format=FORMAT,
        number=1,
        position=Position(step=1, samples_seen=8, seed=0, global_batch=8, dataset_size=9),
        optimizer="Own",
        model_id=model_id(joined(tensors)),
        shards=shards,
        tied={"head": "w"},
    )
    return Checkpoint(commit(Disk(), partial, manifest))


def test_what_devices_hold_in_parts_is_whole_for_torch_and_again_here(tmp_path: Path) -> None:
    checkpoint = cut(tmp_path / "run")
    told: list[tuple[int, int]] = []
    moved = export_dcp(tmp_path / "run", tmp_path / "dcp", lambda done, total: told.append((done, total)))
    assert moved.left == ("position", "rng", "statistics") and told[-1] == (moved.num_bytes,) * 2
    whole = checkpoint.read(["model/w", "model/emb.weight"])
    found: dict[str, Any] = {
        "model": {
            "w": torch.zeros(10, 4),
            "head": torch.zeros(10, 4),
            "emb.weight": torch.zeros(5, 2),
            "norm.running_mean": torch.zeros(2),
        },
        "optim": {"state": {"w": {"count": 0}}},
    }
    dcp.load(found, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert torch.equal(found["model"]["w"], whole["model/w"])
    assert torch.equal(found["model"]["head"], whole["model/w"])
    assert torch.equal(found["model"]["emb.weight"], whole["model/emb.weight"])
    assert found["model"]["norm.running_mean"].tolist() == [2.0, 2.0]  # 0.75 of 1 and 0.25 of 5
    assert found["optim"]["state"]["w"]["count"] == 5
    import_dcp(tmp_path / "dcp", tmp_path / "again", "Own")
    (again,) = checkpoints_in(tmp_path / "again")
    again.check()
    names = ["model/w", "model/head", "model/emb.weight", "optimizer/w/count:int"]
    assert any(n.startswith("values/model/w/10x4/") for n in again.manifest.tensors)
    assert "rows/model/emb.weight/0-3" in again.manifest.tensors
    assert torch.equal(again.read_rows("model/emb.weight", 2, 4), whole["model/emb.weight"][2:4])
    back = again.read(names)
    assert torch.equal(back["model/w"], whole["model/w"]) and back["optimizer/w/count:int"].item() == 5


def test_nothing_is_written_over_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = cut(tmp_path / "run")
    with pytest.raises(UsageError, match="not written over"):
        export_dcp(tmp_path / "run", tmp_path / "run")
    export_dcp(tmp_path / "run", tmp_path / "dcp")
    with pytest.raises(UsageError, match="holds another run"):
        import_dcp(tmp_path / "dcp", tmp_path / "run", "Own")
    with pytest.raises(UsageError, match=r"no \.metadata"):
        import_dcp(tmp_path, tmp_path / "new", "Own")
    with pytest.raises(UsageError, match="class of the optimiser") as e:
        import_dcp(tmp_path / "dcp", tmp_path / "new")
    assert "keeps count" in e.value.numbers and not (tmp_path / "new").exists()

    def stopped(done: int, total: int) -> None:
        raise KeyboardInterrupt

    for move in (
        lambda done: export_dcp(tmp_path / "run", tmp_path / "to", done),
        lambda done: import_dcp(tmp_path / "dcp", tmp_path / "new", "Own", done),
    ):
        with pytest.raises(KeyboardInterrupt):
            move(stopped)
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 9, 0))  # type: ignore[attr-defined]
            with pytest.raises(FileError, match="too little room"):
                move(lambda *_: None)
    assert not (tmp_path / "to").exists() and not list((tmp_path / "new" / FOLDER).iterdir())
    assert checkpoints_in(tmp_path / "run") == [checkpoint]


def test_a_folder_that_others_made_meanwhile_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two exports to one folder: the second removed what the first was writing."""
    checkpoint, target = cut(tmp_path / "run"), tmp_path / "dcp"

    def meanwhile(path: Any) -> Checkpoint:
        target.mkdir()
        (target / "theirs").touch()
        return checkpoint

    monkeypatch.setattr(to_dcp, "chosen", meanwhile)
    with pytest.raises(FileError, match="cannot write"):
        export_dcp(tmp_path / "run", target)
    assert (target / "theirs").exists()


def test_an_empty_tensor_in_parts_is_one() -> None:
    rows = [Part(file="f", start=0, length=9, offsets=(a, 0), sizes=(n, 0)) for a, n in ((0, 1), (1, 2))]
    empty = Stored(name="w", dtype=torch.float32, shape=(3, 0), parts=tuple(rows))
    assert list(_to_write(Path(), {"model/w": empty}, lambda num_bytes: None)) == ["model/w"]


def test_a_number_that_no_tensor_holds_is_refused(tmp_path: Path) -> None:
    held = {"model": {"w": torch.ones(1)}, "optim": {"state": {"w": {"count": 2**63}}}}
    dcp.save(held, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(StateError, match=r"optim\.state\.w\.count"):
        import_dcp(tmp_path / "dcp", tmp_path / "run", "Own")


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"optim": {"state": {"w": {"step": torch.ones(1)}}}, "model": {"v": torch.ones(1)}}, "no model"),
        ({"model": {"a/b": torch.ones(1)}}, "cannot hold"),
        ({"words": ["a"]}, "no model"),
        (
            {
                "model": {"w": torch.ones(1)},
                "optim": {"state": {"w": {"x": torch.ones(1)}}},
                "optimizer": {"state": {"w": {"x": torch.ones(1)}}},
            },
            "several optimisers",
        ),
    ],
)
def test_names_that_fit_nowhere_are_refused(tmp_path: Path, state: dict[str, Any], words: str) -> None:
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(StateError, match=words):
        import_dcp(tmp_path / "dcp", tmp_path / "run", "AdamW")


def test_a_wrong_class_leaves_nothing_and_an_unknown_one_is_told(tmp_path: Path) -> None:
    saved(tmp_path / "theirs")
    with pytest.raises(UsageError, match="not that of SGD"):
        import_dcp(tmp_path / "theirs", tmp_path / "run", "SGD")
    assert not (tmp_path / "run").exists()
    assert "not known here" in import_dcp(tmp_path / "theirs", tmp_path / "run", "Lion").note


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path / "theirs")
    run, back = str(tmp_path / "run"), str(tmp_path / "back")
    asked = [run, "--import-dcp", str(tmp_path / "theirs"), "--optimizer", "AdamW", "--export-dcp", back]
    with pytest.raises(SystemExit) as end:
        main(["checkpoints", *asked, "--json"])
    out, err = capsys.readouterr()
    found = json.loads(out.splitlines()[-1])
    assert end.value.code == 0 and "imported from" in err and "not in it: optim.param_groups" in err
    assert found["imported_dcp"]["from"] == str(tmp_path / "theirs")
    assert found["exported_dcp"]["to"] == back and found["checkpoints"][0]["samples_seen"] == 0
    with pytest.raises(SystemExit) as end:
        main(["checkpoints", run, "--optimizer", "AdamW"])
    assert end.value.code == 2
