"""The training job of the soak: small, in float64, the same loss curve whoever computes it."""

import time
from pathlib import Path

import torch
from torch import nn

import evener as ev
from evener.core.order import epoch_order, global_batch_at
from evener.core.plan import Pipeline, Plan, Share, Stage

SAMPLES, BATCH, EPOCHS, SEED = 60, 12, 4, 0
LAYERS = ("0", "1", "2", "3", "4", "5", "6")


class Slow:
    """Samples that take a moment each, so that a step has a length in which things can happen."""

    def __init__(self, seconds: float) -> None:
        g = torch.Generator().manual_seed(1)
        self.x = torch.randn(SAMPLES, 5, generator=g, dtype=torch.float64)
        self.y = torch.randint(0, 3, (SAMPLES,), generator=g)
        self._seconds = seconds

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int):
        if self._seconds:
            time.sleep(self._seconds)
        return self.x[i], self.y[i]


def recipe(optimizer: str, max_norm: float | None, seconds: float = 0.004) -> ev.Recipe:
    """Seven layers in a row, two of them without parameters."""
    torch.manual_seed(SEED)
    first = [nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.LayerNorm(8)]
    last = [nn.Tanh(), nn.Linear(8, 6), nn.Linear(6, 3)]
    kinds = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    }
    return ev.Recipe(
        model=nn.Sequential(*first, *last).double(),
        dataset=Slow(seconds),
        loss=nn.CrossEntropyLoss(),
        optimizer=kinds[optimizer],
        global_batch=BATCH,
        max_norm=max_norm,
        schedule=lambda seen: 1.0 / (1.0 + seen / 100),
    )


def write_recipe(path: Path, optimizer: str, max_norm: float | None) -> None:
    """A script whose recipe is this one."""
    path.write_text(
        f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\nimport soak_task\n\n\n"
        f"def recipe():\n    return soak_task.recipe({optimizer!r}, {max_norm!r})\n"
    )


def reference(optimizer: str, max_norm: float | None) -> tuple[torch.Tensor, list[float]]:
    """Parameters and losses of an undisturbed run in a plain loop that knows nothing of evener's runtime."""
    r = recipe(optimizer, max_norm, seconds=0.0)
    opt, losses, seen = r.optimizer(r.model.parameters()), [], 0
    rates = [group["lr"] for group in opt.param_groups]
    while seen < EPOCHS * SAMPLES:
        batch = global_batch_at(seen, SAMPLES, BATCH)
        chosen = epoch_order(SAMPLES, batch.epoch, SEED)[batch.start : batch.stop]
        x, y = r.dataset.x[chosen], r.dataset.y[chosen]
        for group, rate in zip(opt.param_groups, rates, strict=True):
            group["lr"] = rate * r.schedule(seen)
        opt.zero_grad()
        loss = r.loss(r.model(x), y)
        loss.backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(r.model.parameters(), max_norm)
        opt.step()
        losses.append(float(loss.detach()))
        seen += batch.samples
    return torch.cat([p.detach().flatten() for p in r.model.parameters()]), losses


def plan_of(shape: str, devices: list[str], rng) -> Plan:
    """A random plan: "data-parallel", one "pipeline" over all devices, or a "hybrid" of two pipelines."""
    if shape == "pipeline" and len(devices) > 1:
        return _plan([_pipeline(devices, BATCH, rng)])
    if shape == "hybrid" and len(devices) > 2:
        samples = rng.randint(3, 9)
        first = devices[: len(devices) // 2 + len(devices) % 2]
        return _plan([_pipeline(first, samples, rng), _pipeline(devices[len(first) :], BATCH - samples, rng)])
    cuts = sorted(rng.sample(range(1, BATCH), len(devices) - 1))
    parts = [b - a for a, b in zip([0, *cuts], [*cuts, BATCH], strict=True)]
    return _plan([_pipeline([d], n, rng) for d, n in zip(devices, parts, strict=True)])


def _plan(pipelines: list[Pipeline]) -> Plan:
    return Plan(global_batch=BATCH, pipelines=tuple(pipelines))


def _pipeline(devices: list[str], samples: int, rng) -> Pipeline:
    cuts = sorted(rng.sample(range(1, len(LAYERS)), len(devices) - 1))
    edges = [0, *cuts, len(LAYERS)]
    size = rng.randint(1, samples)
    stages = tuple(
        Stage(layers=LAYERS[low:high], shares=(Share(devices=(d,), samples=size),))
        for d, low, high in zip(devices, edges, edges[1:], strict=False)
    )
    return Pipeline(samples=samples, micro_batch=size, stages=stages)
