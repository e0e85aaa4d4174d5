"""State in parts by evener, then FSDP2, then evener under other parts: one training, handed on as files."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from evener.report.metrics import read_metrics
from evener.runtime.checkpoints.folder import Checkpoint, checkpoints_in
from evener.session.checkpoints.from_dcp import import_dcp
from evener.session.checkpoints.save_rule import Keep, rule_of
from evener.session.checkpoints.to_dcp import export_dcp
from evener.session.drop_in.checkpoints import load_checkpoint
from evener.session.launching.launch import launch
from tests.local.pool import Pool
from tests.local.test_train_owning import asked, plan

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
SCRIPT = """
import torch, evener as ev
from tests.local.test_dcp import data, network
from torch import nn

def recipe():
    x, y = data()
    return ev.Recipe(model=network(), dataset=list(zip(x, y)), loss=nn.functional.mse_loss, global_batch=12,
                     reduction="mean", shuffle=False, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2))
"""


def network() -> nn.Sequential:
    torch.manual_seed(1)
    layers = [nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 3)]
    return nn.Sequential(*layers).double()


def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(2)
    return torch.randn(60, 6, dtype=torch.float64), torch.randn(60, 3, dtype=torch.float64)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """One on the first twelve samples."""
    x, y = data()
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x[:12]), y[:12])
    loss.backward()
    optimizer.step()
    return loss.item()


def load(model: nn.Module, folder: Path) -> torch.optim.Optimizer:
    """What docs/guide.md says to those who use torch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    weights, kept = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optim": {"state": kept["state"]}}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=kept)
    return optimizer


def tensors(checkpoint: Checkpoint) -> dict[str, Tensor]:
    names = [n for n in checkpoint.manifest.wholes if n.split("/")[0] in ("model", "optimizer")]
    return checkpoint.read(names)


def as_named_here(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    weights, kept = get_state_dict(model, optimizer)
    found: dict[str, Any] = {f"model/{n}": t for n, t in weights.items()}
    states: Any = kept["state"]
    for name, state in states.items():
        found |= {f"optimizer/{name}/{key}": t for key, t in state.items()}
    return {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in found.items()}


def in_fsdp(rank: int, world_size: int, source: Path, target: Path) -> tuple[dict[str, Tensor], float]:
    """Equal parts of two processes: what was loaded, and the loss of a step after which all is saved."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = network()
    for p in model.parameters():
        nn.init.zeros_(p)
    mesh = init_device_mesh("cpu", (world_size,))
    fully_shard(model, mesh=mesh)
    optimizer = load(model, source)
    found = {n: t.clone() for n, t in as_named_here(model, optimizer).items()}
    loss = step(model, optimizer)
    weights, kept = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": kept}, checkpoint_id=target)
    dist.barrier()
    return found, loss


def test_a_training_goes_from_unequal_parts_to_fsdp_and_back(tmp_path: Path, pool: Pool) -> None:
    rule = rule_of("3", Keep(last=1, every=0))
    run, again = tmp_path / "run", tmp_path / "again"
    for folder in (run, again):
        folder.mkdir()
    launch(asked(run, script=SCRIPT, plan=plan("parameters"), steps=3, checkpoint=rule))
    (saved,) = checkpoints_in(run)
    assert any(name.startswith("values/") for name in saved.manifest.tensors)
    export_dcp(run, tmp_path / "dcp")

    model, want = network(), network()
    optimizer = load(model, tmp_path / "dcp")
    expected, found = tensors(saved), as_named_here(model, optimizer)
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    plain = torch.optim.AdamW(want.parameters(), lr=1e-2)
    load_checkpoint(run, want, plain)
    loss = step(model, optimizer)
    assert loss == step(want, plain)

    shards = pool.run(in_fsdp, 2, tmp_path / "dcp", tmp_path / "fsdp")
    for held, after in shards:
        assert all(torch.equal(held[name], tensor) for name, tensor in expected.items())
        assert after == loss

    import_dcp(tmp_path / "fsdp", again, "AdamW")
    other = network()
    state = as_named_here(other, load(other, tmp_path / "fsdp"))
    assert all(torch.equal(state[name], t) for name, t in tensors(checkpoints_in(again)[0]).items())
    more = {"script": SCRIPT, "resume": str(again), "steps": 1, "checkpoint": rule}
    launch(asked(again, plan=plan("optimizer", (1, 0, 4)), **more))
    loss = step(model, optimizer)
    (record,) = read_metrics(again / "metrics.jsonl").records
    assert record.loss == pytest.approx(loss, rel=1e-12)
    end = tensors(checkpoints_in(again)[0])
    for name, tensor in as_named_here(model, optimizer).items():
        assert torch.allclose(end[name], tensor, rtol=1e-10, atol=1e-13), name
