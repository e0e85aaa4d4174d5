"""What the executor costs where nothing is uneven: two equal unpaced processes, one cut, beside torch's 1F1B.

Each rival holds a model of its own and takes steps in turn, in rotating order: evener over shared memory and
over TCP, torch's Schedule1F1B twice. The second torch is the control: what its ratio to the first differs
from 1 is what this machine cannot tell apart. Each step ends with the optimiser; evener's also agrees on it.
"""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from common import run_processes, say
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from evener import schedules
from evener.core.plan import Pipeline, Plan, Share, Stage
from evener.core.routes import Routes
from evener.runtime.channels import channel
from evener.runtime.channels.channel import open_channel
from evener.runtime.channels.sums import ChannelWire
from evener.runtime.cutting import cut, layer_names
from evener.runtime.executor import Executor
from evener.runtime.hardware import HardwareDriver
from evener.runtime.holding import Holding, Settings
from evener.runtime.parts import Part
from evener.runtime.problem import Problem, default_inputs
from evener.runtime.ranks import Ranks
from evener.runtime.reducers import reducers_for
from evener.runtime.segments import segments_of
from evener.runtime.wire import GroupWire, SoloWire

DEVICES = ("h/a", "h/b")
CPU = torch.device("cpu")
ROWS, WARM_UP = 4, 5
LEARNING_RATE = 1e-7  # small: the loss has no bottom, and a step whose loss is no number is skipped
CASES = {
    "almost no compute": {"width": 16, "length": 8, "depth": 2, "micro_batches": 16, "heads": 0},
    "2 ms and more": {"width": 256, "length": 64, "depth": 2, "micro_batches": 8, "heads": 4},
}
RIVALS = ("shared", "tcp", "varying", "torch", "control")
Step = Callable[[int], None]


def model_of(case: dict[str, int]) -> nn.Sequential:
    """The same model every time; two equal halves."""
    torch.manual_seed(0)
    width, depth = case["width"], case["depth"]
    if not case["heads"]:
        return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))
    return nn.Sequential(
        *(
            nn.TransformerEncoderLayer(
                width, case["heads"], 4 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(depth)
        )
    )


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """A loss that costs next to nothing."""
    return output.sum()


def lengths_of(case: dict[str, int], *, varying: bool) -> list[int]:
    """Lengths of the micro-batches; varying ones rise from an eighth below the mean to an eighth above.

    They rise, because short and long ones in turn would idle one stage while the other has a long one: by
    about the eighth, under any executor.
    """
    length, last = case["length"], case["micro_batches"] - 1
    rise = [round(length * (m / last - 0.5) / 4) for m in range(last + 1)]
    return [length + more * varying for more in rise]


def evener_step(rank: int, case: dict[str, int], transport: str) -> tuple[Step, nn.Module]:
    """A function that takes one step under evener's executor, and the model."""
    model, here = model_of(case), DEVICES[rank]
    names = layer_names(model)
    halves = (names[: len(names) // 2], names[len(names) // 2 :])
    count = case["micro_batches"]
    lengths = lengths_of(case, varying=transport == "varying")
    batches = [(torch.ones(ROWS, n, case["width"]), torch.zeros(ROWS, n, case["width"])) for n in lengths]
    made = cut(model, halves, example=((batches[0][0],), {}))
    stages = tuple(
        Stage(layers=layers, shares=(Share(devices=(name,), samples=ROWS),))
        for layers, name in zip(halves, DEVICES, strict=True)
    )
    total = ROWS * count
    plan = Plan(
        global_batch=total,
        pipelines=(Pipeline(samples=total, micro_batch=ROWS, stages=stages),),
        schedule="1f1b",
    )
    problem, ranks = Problem(loss=loss_of, inputs=default_inputs), Ranks(DEVICES, here)
    part = Part(
        stage=rank,
        module=made.stages[rank],
        problem=problem,
        device=CPU,
        is_first=rank == 0,
        is_last=rank == 1,
        ends=made,
    )
    named = dict(model.named_parameters())
    held = {number: [n for n in stage.named if n in named] for number, stage in enumerate(made.stages)}
    segments = segments_of(held, {0: DEVICES[:1], 1: DEVICES[1:]}, {}, list(named))
    reducers = reducers_for(segments, here, frozenset({rank}), named, lambda among: SoloWire(), 2)
    channel.IS_AVAILABLE = transport != "tcp"
    store = dist.PrefixStore(transport, dist.distributed_c10d._get_default_store())
    end = open_channel(ranks, store)
    holding = Holding(
        parts={rank: part},
        reducers=reducers,
        wire=GroupWire(),
        channel=end,
        quick=ChannelWire(end, ranks),
    )
    optimizer = torch.optim.SGD([named[n] for n in held[rank]], lr=LEARNING_RATE)
    executor = Executor(holding, optimizer, problem, ranks, HardwareDriver(CPU), Settings())
    row, routes = schedules.make(plan).actions[here], Routes(plan)

    def step(number: int) -> None:
        executor.step(number, row, routes, lambda stage, m: batches[m], total)

    return step, model


def torch_step(rank: int, case: dict[str, int]) -> tuple[Step, nn.Module]:
    """A function that takes the same step under torch's Schedule1F1B."""
    model = model_of(case)
    half = nn.Sequential(*list(model)[rank * len(model) // 2 : (rank + 1) * len(model) // 2])
    stage = PipelineStage(half, rank, 2, CPU)
    count = case["micro_batches"]
    schedule = Schedule1F1B(stage, count, loss_fn=loss_of)
    optimizer = torch.optim.SGD(half.parameters(), lr=LEARNING_RATE)
    shape = (ROWS * count, case["length"], case["width"])
    x, y = torch.ones(shape), torch.zeros(shape)

    def step(number: int) -> None:
        if rank == 0:
            schedule.step(x, return_outputs=False)
        else:
            schedule.step(target=y, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()

    return step, model


def race(rank: int, world_size: int, case: dict[str, int], rounds: int) -> dict[str, Any]:
    """Seconds of `rounds` steps by rival, taken in turn, and of computing; how far the models ended apart."""
    made = {name: evener_step(rank, case, name) for name in RIVALS[:3]}
    made |= {name: torch_step(rank, case) for name in RIVALS[3:]}
    seconds: dict[str, list[float]] = {name: [] for name in RIVALS}
    busy: dict[str, list[float]] = {name: [] for name in RIVALS}
    for number in range(WARM_UP + rounds):
        first = number % len(RIVALS)
        for name in RIVALS[first:] + RIVALS[:first]:
            dist.barrier()
            start, start_busy = time.perf_counter(), time.process_time()
            made[name][0](number)
            if number >= WARM_UP:
                seconds[name].append(time.perf_counter() - start)
                busy[name].append(time.process_time() - start_busy)
    dist.barrier()
    half = slice(rank * case["depth"] // 2, (rank + 1) * case["depth"] // 2)
    ours, theirs = (list(made[name][1][half].parameters()) for name in ("shared", "torch"))
    apart = max(float((a - b).abs().max().detach()) for a, b in zip(ours, theirs, strict=True))
    return {"seconds": seconds, "busy": busy, "apart": apart}


def overhead(name: str, rounds: int) -> dict[str, Any]:
    """Ratios of medians for case `name` to torch, and microseconds an action."""
    case = CASES[name]
    results = run_processes(race, 2, case, rounds)
    # A step ends when the slower of the two processes has ended it.
    steps = {r: list(map(max, *(x["seconds"][r] for x in results))) for r in RIVALS}
    medians = {r: median(steps[r]) for r in RIVALS}
    computing = {r: median(map(max, *(x["busy"][r] for x in results))) for r in RIVALS}
    # Rivals of one round meet the same machine: the median of their ratios scatters less than medians do.
    ratio = {r: median(a / b for a, b in zip(steps[r], steps["torch"], strict=True)) for r in RIVALS}
    actions = 2 * case["micro_batches"]
    say(
        f"overhead, {name}: "
        + ", ".join(
            f"{r} {medians[r] * 1e3:.2f} ms ({ratio[r]:.3f}, computing {computing[r] * 1e3:.2f})"
            for r in RIVALS
        )
    )
    return {
        "case": name,
        "rounds": rounds,
        "median_s": medians,
        "processor_s": computing,
        "ratio": ratio,
        "control": ratio["control"],
        "action_us": {r: medians[r] / actions * 1e6 for r in RIVALS},
        "varying_over_fixed": median(a / b for a, b in zip(steps["varying"], steps["shared"], strict=True)),
        "parameters_apart": max(x["apart"] for x in results),
    }


if __name__ == "__main__":
    for case_name in CASES:
        print(overhead(case_name, 60))
