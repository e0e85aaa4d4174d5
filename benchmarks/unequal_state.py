"""State in unequal parts: does it fit where equal parts do not, and what does it cost?

    python benchmarks/unequal_state.py --json
    python benchmarks/unequal_state.py --only fsdp --json        one of fsdp, memory, throughput

fsdp        two equal devices, equal parts, one model in one run: a step beside one of FSDP2 `fully_shard`
memory      three rehearsed accelerators with memories 5:3:2 and state in parts 5:3:2: predicted bytes beside
            the allocator's peak, and that the same job with equal parts runs out of memory
throughput  a paced fleet on which plain data parallelism fits: samples/s of each way to hold state, over it
"""

import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import nn

from benchmarks.common import Bar, finish, fleet_named, parser, run_processes, say, train
from evener.core.catalogue import FleetFile, FleetLine, resolved
from evener.core.figures import Figure
from evener.core.fleet import Device, Fleet
from evener.core.layers import find_layers
from evener.core.plan import Held, Ownership, Pipeline, Plan, Share, Stage
from evener.core.routes import Routes
from evener.cost.model import CostModel
from evener.cost.owned import play_owned
from evener.errors import NoPlanFitsError, OutOfMemoryError
from evener.runtime.executor import Executor
from evener.runtime.hardware import HardwareDriver
from evener.runtime.holding import Holding, Settings
from evener.runtime.owning.owned import Means, Owned
from evener.runtime.owning.post import GroupPost
from evener.runtime.parts import Part
from evener.runtime.problem import Problem, default_inputs
from evener.runtime.ranks import Ranks
from evener.runtime.wire import GroupWire
from evener.schedules import make
from evener.session.launching.launch import launch
from evener.session.request import Request, folder_at

WAYS: tuple[Held, ...] = ("optimizer", "gradients", "parameters")
NAMES = ("lab/0", "lab/1")
WIDTH, DEPTH, SAMPLES = 768, 8, 256
LAYERS = 6  # of 1024 x 1024, where memory is looked at: 96 MiB with gradients and AdamW's state
WHOLE_MIB = 190.0  # in parts 5:3:2 the smallest has 38 MiB; a third of all and of AdamW's scratch are 40
NOTHING = Figure(value=1.0, source="assumed")

SCRIPT = """
import torch, evener as ev
from torch import nn

def recipe():
    torch.manual_seed(1)
    x, y = torch.randn(960, 1024), torch.randint(0, 8, (960,))
    blocks = [nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range({depth})]
    return ev.Recipe(model=nn.Sequential(*blocks, nn.Linear(1024, 8)), dataset=list(zip(x, y)),
                     loss=nn.CrossEntropyLoss(), global_batch=40,
                     optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3))
"""


def model() -> nn.Module:
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        for _ in range(DEPTH)
    ]
    return nn.Sequential(*(Residual(b) for b in blocks), nn.Linear(WIDTH, 16))


class Residual(nn.Module):
    """x + inner(x)."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


def plan_of(held: Held) -> Plan:
    """Two devices, half of everything each."""
    layers = find_layers(model())
    stage = tuple(x.name for x in layers)
    return Plan(
        global_batch=2 * SAMPLES,
        schedule="1f1b",
        pipelines=tuple(
            Pipeline(
                samples=SAMPLES,
                micro_batch=SAMPLES,
                stages=(Stage(layers=stage, shares=(Share(devices=(name,), samples=SAMPLES),)),),
            )
            for name in NAMES
        ),
        owners=tuple(Ownership(layer=x, parts=dict.fromkeys(NAMES, 1), held=held) for x in stage),
    )


def ours(rank: int, held: Held) -> Any:
    """A function that takes one step over (x, y)."""
    ranks, cpu, wire = Ranks(NAMES, NAMES[rank]), torch.device("cpu"), GroupWire()
    module, plan = model(), plan_of(held)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    driver = HardwareDriver(cpu)
    group = dist.new_group([0, 1], backend="gloo")
    means = Means(ranks=ranks, post=GroupPost(group, NAMES), wire=wire, device=cpu, now=driver.now)
    owned = Owned(module, optimizer, plan, means)
    problem = Problem(loss=nn.functional.cross_entropy, inputs=default_inputs)
    part = Part(stage=rank, module=module, problem=problem, device=cpu)
    holding = Holding(parts={rank: part}, reducers=owned.reducers(), wire=wire, owned=owned)
    executor = Executor(holding, optimizer, problem, ranks, driver, Settings())
    row, routes = make(plan).actions[NAMES[rank]], Routes(plan)
    numbers = iter(range(10**6))
    return lambda batch: (
        executor.step(next(numbers), row, routes, lambda s, m: batch, 2 * SAMPLES).totals.loss
    )


def theirs() -> Any:
    """The same with FSDP2, a group a layer, which is gathered again for the backward."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    module, mesh = model(), init_device_mesh("cpu", (2,))
    for layer in module:
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)

    def step(batch: tuple[torch.Tensor, torch.Tensor]) -> float:
        loss = nn.functional.cross_entropy(module(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        both = loss.detach().clone()
        dist.all_reduce(both)
        return float(both) / 2

    return step


def side_by_side(rank: int, world_size: int, pairs: int) -> dict[str, list[float]]:
    """Seconds of each step, the ways in turn; RuntimeError where they do not learn the same."""
    generator = torch.Generator().manual_seed(rank)
    batch = (
        torch.randn(SAMPLES, WIDTH, generator=generator),
        torch.randint(0, 16, (SAMPLES,), generator=generator),
    )
    steps = {"fsdp2": theirs()} | {held: ours(rank, held) for held in WAYS}
    losses: dict[str, list[float]] = {name: [] for name in steps}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(pairs + 3):
        for name, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            losses[name].append(step(batch))
            if number >= 3:
                seconds[name].append(time.perf_counter() - start)
    for name, found in losses.items():
        error = max(abs(a - b) for a, b in zip(found[:5], losses["fsdp2"][:5], strict=True))
        if error > 1e-4:
            raise RuntimeError(f"{name} does not learn what FSDP2 learns: losses are {error} apart")
    return seconds


def against_fsdp(pairs: int) -> tuple[dict[str, Any], list[Bar]]:
    found = run_processes(side_by_side, 2, pairs)[0]
    steps = {name: median(seconds) for name, seconds in found.items()}
    ratio = {name: median(a / b for a, b in zip(found[name], found["fsdp2"], strict=True)) for name in WAYS}
    say("  ".join(f"{name} {1e3 * s:.1f} ms" for name, s in steps.items()))
    bars = [Bar(name="parameters in parts, step over FSDP2's", value=ratio["parameters"], at_most=1.05)]
    return {"step_s": steps, "over_fsdp2": ratio}, bars


def three_cards(mib: float | None) -> Fleet:
    """Accelerators with memories 5:3:2, `mib` in all; None: with those of the catalogue."""
    kinds = ("RTX 3090", "RTX 3080", "RTX 3060")
    own = [
        {"memory_bytes": of_whole(mib, part), "framework_bytes": NOTHING} if mib else {} for part in (5, 3, 2)
    ]
    file = FleetFile(
        devices=tuple(
            Device(name=f"lab/gpu{i}", kind=kind, **more)
            for i, (kind, more) in enumerate(zip(kinds, own, strict=True))
        ),
        links=(FleetLine(a="lab", b="lab", kind="PCIe 4.0 x16"),),
    )
    return resolved(file, "here").as_rehearsed()


def of_whole(mib: float, part: int) -> Figure:
    return Figure(value=float(round(mib * 2**20 * part / 10)), source="assumed")


def memory(steps: int) -> tuple[dict[str, Any], list[Bar]]:
    """Peaks in parts 5:3:2 by what is held in them; all three of a model that does not fit in equal parts."""
    os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"  # segments of 20 MiB are large here
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="evener-benchmark-") as folder:
        script = Path(folder) / "task.py"
        script.write_text(SCRIPT.format(depth=LAYERS), encoding="utf-8")
        wide, narrow = three_cards(None), three_cards(WHOLE_MIB)
        measured = train(wide, script=script, steps=1, profile_s=3.0, keep_all=True)
        parts = dict(zip((d.name for d in wide.devices), (5, 3, 2), strict=True))
        base = Request(
            script=str(script),
            fleet=narrow,
            rehearse=True,
            run_dir=folder,
            evaluate=False,
            quiet=True,
            steps=steps,
            profile=measured.profile,
            keep_all=True,
            state="parameters",
            parts=parts,
        )
        for held in WAYS:
            fleet = narrow if held == "parameters" else wide  # what is kept whole is too much for narrow ones
            figures[held] = beside_predicted(replace(base, fleet=fleet, state=held))
            say(f"{held}: off by " + ", ".join(f"{e:+.2%}" for e in figures[held]["errors"].values()))
        try:
            launch(replace(base, parts=dict.fromkeys(parts, 1), run_dir=folder_at(folder + "/equal")))
            figures["equal_parts"] = "fits"
        except (OutOfMemoryError, NoPlanFitsError) as e:
            figures["equal_parts"] = e.what
        say(f"equal parts: {figures['equal_parts']}")
    errors = [e for held in WAYS for e in figures[held]["errors"].values()]
    return figures, [
        Bar(name="predicted bytes, off by", value=max(map(abs, errors)), at_most=0.05),
        Bar(name="predicted bytes below those held, at most", value=-min(errors), at_most=0.02),
        Bar(name="equal parts do not fit", value=float(figures["equal_parts"] != "fits"), at_least=1.0),
    ]


def beside_predicted(request: Request) -> dict[str, Any]:
    """The run's peaks beside those predicted for its plan, in bytes by device."""
    outcome = launch(request)
    assert request.profile is not None
    model = CostModel(fleet=request.fleet, profile=request.profile)
    told = play_owned(model, outcome.plan).memory_bytes
    held = {d: f.value for d, f in outcome.peak_bytes.items()}
    return {
        "samples": outcome.plan.samples_by_device(),
        "predicted_bytes": told,
        "peak_bytes": held,
        "errors": {d: told[d] / held[d] - 1 for d in told},
    }


def throughput(steps: int) -> tuple[dict[str, Any], list[Bar]]:
    """Samples/s on a paced fleet, over plain data parallelism."""
    fleet = fleet_named("8-4-2-2")
    plain = train(fleet, steps=steps, adapt=False)
    found = {"replicated": plain.report.samples_per_s}
    for held in WAYS:
        run = train(fleet, steps=steps, profile=plain.profile, state=held, adapt=False)
        found[held] = run.report.samples_per_s
    say("  ".join(f"{name} {rate:.1f} samples/s" for name, rate in found.items()))
    over = {held: found[held] / found["replicated"] for held in WAYS}
    return {"samples_per_s": found, "over_plain": over}, [
        Bar(name="optimizer state in parts, samples/s over plain", value=over["optimizer"], at_least=0.95)
    ]


def main() -> int:
    p = parser(__doc__ or "")
    p.add_argument("--only", choices=("fsdp", "memory", "throughput"))
    options = p.parse_args()
    quick = options.quick
    tasks = {
        "fsdp": lambda: against_fsdp(3 if quick else 25),
        "memory": lambda: memory(2 if quick else 4),
        "throughput": lambda: throughput(4 if quick else 20),
    }
    figures: dict[str, Any] = {}
    bars: list[Bar] = []
    for name, task in tasks.items():
        if options.only in (None, name):
            say(f"{name}:")
            figures[name], more = task()
            bars += more
    return finish(figures, bars, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
