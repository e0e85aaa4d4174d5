"""What a message between two stages costs: one way by transport and size, and per action of a pipeline.

    python benchmarks/channels.py --json

One way is half of a round trip between two processes of one thread, both awake ("local": two threads of one
process). An action is a forward or backward of a two-stage 1F1B over 16 micro-batches with almost no compute;
its microseconds are step ÷ actions of one device, computing included, beside torch's own Schedule1F1B. The
bars in microseconds want an idle machine; the ratios and the computing hold on a busy one too.
"""

import os
import sys
import threading
import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from common import Bar, finish, parser, run_processes, say
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from evener.core.actions import Action, parse_action
from evener.core.seams import Channel, Pending
from evener.runtime.channels import channel
from evener.runtime.channels.channel import open_channel
from evener.runtime.channels.local import Hub
from evener.runtime.ranks import Ranks

DEVICES = ("h/a", "h/b")
CPU = torch.device("cpu")
SIZES = {"64 B": 64, "64 KiB": 2**16, "1 MiB": 2**20}
WIDTH, ROWS, NUM_MICRO = 16, 4, 16
BARS_US = {"shared": 160.0, "tcp": 400.0}


def open_here(rank: int, transport: str) -> Channel:
    """This process's channel over `transport`; "tcp" is what two hosts would get."""
    channel.IS_AVAILABLE = transport == "shared"
    store = dist.PrefixStore(transport, dist.distributed_c10d._get_default_store())
    return open_channel(Ranks(DEVICES, DEVICES[rank]), store)


def round_trips(end: Channel, rank: int, num_bytes: int, count: int) -> list[float]:
    """Microseconds one way, `count` times."""
    tensor, peer = torch.ones(num_bytes // 4), DEVICES[1 - rank]
    found = []
    for i in range(count):
        key = f"1SEND_F{i} of step 3"
        start = time.perf_counter()
        if rank == 0:
            sent = end.send((tensor,), peer, key)
        (tensor,) = end.receive(peer, key, device=CPU).wait()
        if rank == 1:
            sent = end.send((tensor,), peer, key)
        found.append((time.perf_counter() - start) / 2 * 1e6)
        if i % 16 == 15:
            sent.wait()
    return found[count // 10 :]


def latencies(rank: int, world_size: int, transport: str, count: int) -> dict[str, float]:
    """Median microseconds one way by size."""
    end = open_here(rank, transport)
    result = {name: median(round_trips(end, rank, size, count)) for name, size in SIZES.items()}
    dist.barrier()
    end.close()
    return result


def local_latencies(count: int) -> dict[str, float]:
    """The same between two threads."""
    hub = Hub()
    ends = [open_channel(Ranks(DEVICES, here), hub=hub) for here in DEVICES]
    result = {}
    for name, size in SIZES.items():
        other = threading.Thread(target=round_trips, args=(ends[1], 1, size, count))
        other.start()
        result[name] = median(round_trips(ends[0], 0, size, count))
        other.join()
    return result


class TinyPipeline:
    """One of two stages of one small layer each, run by its row of 1F1B."""

    def __init__(self, end: Channel, rank: int) -> None:
        self.end, self.rank, self.peer = end, rank, DEVICES[1 - rank]
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.row = row(rank)

    def step(self) -> None:
        inputs: dict[int, torch.Tensor] = {}
        outputs: dict[int, torch.Tensor] = {}
        pending: list[Pending] = []
        for action in self.row:
            m = action.micro_batch or 0
            if action.type == "F":
                x = self.receive(f"F{m}") if self.rank else torch.ones(ROWS, WIDTH)
                inputs[m], outputs[m] = x, self.layer(x)
                if not self.rank:
                    pending.append(self.end.send((outputs[m],), self.peer, f"F{m}"))
            elif self.rank:
                outputs.pop(m).sum().backward()
                gradient = inputs.pop(m).grad
                assert gradient is not None
                pending.append(self.end.send((gradient,), self.peer, f"B{m}"))
            else:
                outputs.pop(m).backward(self.receive(f"B{m}"))
        for sent in pending:
            sent.wait()

    def receive(self, key: str) -> torch.Tensor:
        (got,) = self.end.receive(self.peer, key, device=CPU).wait()
        return got


def row(rank: int) -> list[Action]:
    """1F1B of two stages: the first runs one micro-batch ahead."""
    ahead = 2 - rank
    spelt = [f"{rank}F{m}" for m in range(ahead)]
    for m in range(NUM_MICRO):
        spelt += [f"{rank}B{m}"] + ([f"{rank}F{m + ahead}"] if m + ahead < NUM_MICRO else [])
    return [parse_action(word) for word in spelt]


def actions(rank: int, world_size: int, steps: int) -> dict[str, tuple[float, float]]:
    """Median microseconds per action, the three in turn: on the wall, and of this process's own computing."""
    torch.manual_seed(0)
    mine = {t: TinyPipeline(open_here(rank, t), rank) for t in BARS_US}
    dist.barrier()
    layer = nn.Linear(WIDTH, WIDTH)
    stage = PipelineStage(layer, rank, 2, CPU, input_args=(torch.ones(ROWS, WIDTH),))
    schedule = Schedule1F1B(stage, NUM_MICRO, loss_fn=lambda y, target: y.sum(), scale_grads=False)
    batch = torch.ones(ROWS * NUM_MICRO, WIDTH)

    def torchs() -> None:
        schedule.step(batch) if rank == 0 else schedule.step(target=batch)

    turns = {name: pipeline.step for name, pipeline in mine.items()} | {"torch": torchs}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in turns}
    for _ in range(steps):
        for name, step in turns.items():
            dist.barrier()
            start, start_cpu = time.perf_counter(), time.process_time()
            step()
            taken = time.perf_counter() - start, time.process_time() - start_cpu
            found[name].append((taken[0] / (2 * NUM_MICRO) * 1e6, taken[1] / (2 * NUM_MICRO) * 1e6))
    dist.barrier()
    return {
        name: (median(wall for wall, _ in x[steps // 10 :]), median(cpu for _, cpu in x[steps // 10 :]))
        for name, x in found.items()
    }


def main() -> int:
    """Measure, tell, compare with the bars."""
    args = parser(__doc__ or "").parse_args()
    torch.set_num_threads(1)
    count, steps = (60, 20) if args.quick else (1000, 200)
    figures: dict[str, Any] = {"one_way_us": {}}
    for transport in BARS_US:
        figures["one_way_us"][transport] = run_processes(latencies, 2, transport, count)[0]
    figures["one_way_us"]["local"] = local_latencies(count)
    for transport, by_size in figures["one_way_us"].items():
        say(f"{transport:7} one way: " + ", ".join(f"{n} {us:.0f} µs" for n, us in by_size.items()))
    by_rank = run_processes(actions, 2, steps)
    figures["action_us"] = {name: max(r[name][0] for r in by_rank) for name in by_rank[0]}
    figures["action_cpu_us"] = {name: max(r[name][1] for r in by_rank) for name in by_rank[0]}
    for name, us in figures["action_us"].items():
        say(f"per action, {name}: {us:.0f} µs, {figures['action_cpu_us'][name]:.0f} µs of them computing")
    bars = [Bar(name=f"action_us {t}", value=figures["action_us"][t], at_most=b) for t, b in BARS_US.items()]
    for transport, most in (("shared", 0.6), ("tcp", 1.0)):
        ratio = figures["action_us"][transport] / figures["action_us"]["torch"]
        bars.append(Bar(name=f"{transport} / torch", value=ratio, at_most=most))
    return finish(figures, bars, as_json=args.json)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
