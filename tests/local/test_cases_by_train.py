"""K10 and K11 through `ev.train` in two processes, against a loop in plain PyTorch written out here."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import cross_entropy

SCRIPT = """
import sys, torch, evener as ev
from torch import nn
from torch.nn.functional import cross_entropy
from evener.core.fleet import Device, Fleet
from evener.core.plan import Pipeline, Plan, Share, Stage
sys.path.insert(0, {tests!r})
from tests.local.test_cases_by_train import blocks, masked_samples, samples, tied, words

def pipeline(global_batch, micro_batch, *layers):
    stages = tuple(
        Stage(layers=tuple(names.split()), shares=(Share(devices=(device,), samples=micro_batch),))
        for names, device in zip(layers, ("lab/a", "lab/b"))
    )
    made = Pipeline(samples=global_batch, micro_batch=micro_batch, stages=stages)
    return Plan(global_batch=global_batch, pipelines=(made,), schedule="1f1b")

recipe = ev.Recipe(
    optimizer=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), shuffle=False, global_batch={batch},
    {recipe}
)
fleet = Fleet(devices=tuple(Device(name=n, kind="cpu", threads=1) for n in ("lab/a", "lab/b")))
ev.train(recipe, plan={plan}, fleet=fleet, steps={steps}, run_dir={folder!r}, quiet=True)
{after}
"""
CUT_4_1 = 'pipeline(8, 3, "0 1 2 3 4 5 6 7", "8")'


def samples() -> list[tuple[torch.Tensor, torch.Tensor]]:
    g = torch.Generator().manual_seed(1)
    return [(torch.randn(5, generator=g).double(), torch.randint(0, 3, (), generator=g)) for _ in range(14)]


def masked_samples() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Most of the first micro-batch, one of the next, all but one of the last."""
    return [
        (x, y if i not in (0, 1, 5, 11, 12) else torch.tensor(-100)) for i, (x, y) in enumerate(samples())
    ]


def words() -> list[tuple[torch.Tensor, torch.Tensor]]:
    ids = torch.randint(0, 11, (10, 4), generator=torch.Generator().manual_seed(1))
    return list(zip(ids, ids.roll(1, 1), strict=True))


def blocks() -> nn.Module:
    torch.manual_seed(7)
    layers = [layer for _ in range(4) for layer in (nn.Linear(5, 5), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(5, 3)).double()


class Tied(nn.Module):
    """Embedding(11, 5) → tanh → a head with the same matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 5), nn.Linear(5, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.embed(ids)))


def tied() -> nn.Module:
    torch.manual_seed(7)
    return Tied().double()


def trained(folder: Path, *, recipe: str, plan: str, batch: int, steps: int, after: str = "") -> Path:
    """Run `ev.train` in two processes as torchrun would start them; the file of weights they leave."""
    script = folder / "job.py"
    script.write_text(
        SCRIPT.format(
            tests=str(Path(__file__).parents[2]),
            recipe=recipe,
            plan=plan,
            batch=batch,
            steps=steps,
            folder=str(folder),
            after=after,
        ),
        encoding="utf-8",
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    common = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    common["OMP_NUM_THREADS"] = "1"
    processes = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
        )
        for rank in range(2)
    ]
    try:
        said = [p.communicate(timeout=110)[1] for p in processes]
    finally:
        for p in processes:
            p.kill()
    assert [p.returncode for p in processes] == [0, 0], "\n".join(said)
    return folder / "model.safetensors"


def distance(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """‖found − wanted‖ / ‖wanted‖ over all names of `found`."""
    error = sum(float((t - wanted[n]).square().sum()) for n, t in found.items())
    return (error / sum(float(wanted[n].square().sum()) for n in found)) ** 0.5


@pytest.mark.parametrize("case", ["sum", "masked"])
def test_k10_trains_to_the_parameters_of_a_plain_loop(case: str, tmp_path: Path) -> None:
    """Cut 4+1; 8 samples in micro-batches of 3, 3 and 2, then the epoch's last 6 in two; two epochs."""
    options = "dataset=samples(), loss=nn.CrossEntropyLoss(reduction='sum')"
    if case == "masked":
        weight = "lambda b: (b[1] != -100).sum()"
        options = f"dataset=masked_samples(), loss=nn.CrossEntropyLoss(), weight={weight}"
    path = trained(tmp_path, recipe=f"model=blocks(), {options}", plan=CUT_4_1, batch=8, steps=4)

    model = blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = samples() if case == "sum" else masked_samples()
    for start, stop in ((0, 8), (8, 14), (0, 8), (8, 14)):
        x = torch.stack([sample for sample, _ in data[start:stop]])
        y = torch.stack([label for _, label in data[start:stop]])
        optimizer.zero_grad()
        (cross_entropy(model(x), y, reduction="sum") / (y != -100).sum()).backward()
        optimizer.step()
    assert distance(load_file(path), model.state_dict()) <= 1e-12
    assert distance(dict(blocks().state_dict()), model.state_dict()) > 1e-2, "the steps moved something"


def test_k11_tied_weights_train_as_in_a_plain_loop_and_stay_tied(tmp_path: Path) -> None:
    check = (
        "assert recipe.model.head.weight is recipe.model.embed.weight\n"
        f"torch.save(recipe.model.state_dict(), {str(tmp_path)!r} + '/state.pt')"
    )
    path = trained(
        tmp_path,
        recipe="model=tied(), dataset=words(), loss=lambda o, t: cross_entropy(o.flatten(0, 1), t.flatten())",
        plan='pipeline(6, 2, "embed", "head")',
        batch=6,
        steps=5,
        after=check,
    )

    model, data = tied(), words()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for start, stop in ((0, 6), (6, 10), (0, 6), (6, 10), (0, 6)):
        ids = torch.stack([x for x, _ in data[start:stop]])
        target = torch.stack([y for _, y in data[start:stop]])
        optimizer.zero_grad()
        cross_entropy(model(ids).flatten(0, 1), target.flatten()).backward()
        optimizer.step()
    saved = load_file(path)
    assert list(saved) == ["embed.weight"], "one parameter, whoever holds it"
    assert distance(saved, model.state_dict()) <= 1e-12
    kept = torch.load(tmp_path / "state.pt", weights_only=True)
    assert torch.equal(kept["embed.weight"], kept["head.weight"])
    assert torch.equal(kept["head.weight"], saved["embed.weight"])
    again = tied()
    again.load_state_dict(kept)
    assert again.head.weight is again.embed.weight
