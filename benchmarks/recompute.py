"""Does recomputing a stage's forward lower the memory of its device as predicted, with the same gradients?

python benchmarks/recompute.py --json

Two processes run two stages of a byte transformer of 16 blocks, all micro-batches forward and then all
backward. What a step holds beyond what it found is counted tensor by tensor, as they are made and let go.
"""

import os
import sys
import weakref
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.common import Bar, finish, parser, run_processes, say
from benchmarks.deep_text import recipe
from evener.core.fleet import Device, Fleet
from evener.core.plan import Pipeline, Plan, Share, Stage
from evener.core.profile import Profile
from evener.cost.memory import model_bytes, stage_memory
from evener.profiling import profile_model
from evener.runtime.hardware import HardwareDriver
from evener.runtime.ranks import Ranks
from evener.session.layout.lay_out import lay_out
from evener.session.layout.seat import Seat
from evener.session.loop.steps import Steps
from evener.session.meeting import Meeting
from evener.session.site import open_site

NAMES = ("h/a", "h/b")
MICRO_BATCH = 2
CUT_AFTER = "blocks.9"


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that come into being inside, while they live: now and at most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        before = {_key(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and _key(tensor) not in before:
                self._begin(tensor.untyped_storage())
        return result

    def _begin(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        self._known[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._end, key)

    def _end(self, key: int) -> None:
        self.now -= self._known.pop(key)


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def plan_of(layers: tuple[str, ...], num_micro_batches: int, *, recompute: bool) -> Plan:
    """Two stages, a device each, whose devices hold all micro-batches at once."""
    cut = layers.index(CUT_AFTER) + 1
    stages = tuple(
        Stage(layers=part, shares=(Share(devices=(name,), samples=MICRO_BATCH),), recompute=recompute)
        for part, name in zip((layers[:cut], layers[cut:]), NAMES, strict=True)
    )
    samples = MICRO_BATCH * num_micro_batches
    pipeline = Pipeline(samples=samples, micro_batch=MICRO_BATCH, stages=stages)
    return Plan(global_batch=samples, pipelines=(pipeline,), schedule="gpipe")


def measure(rank: int, world_size: int, plans: list[Plan]) -> list[tuple[int, dict[str, torch.Tensor]]]:
    """By plan, the most bytes that this process's second step held beyond what it found, and gradients."""
    where: list[Any] = [None]
    if rank == 0:
        ours = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        where = [ours.port]
    dist.broadcast_object_list(where)
    store = ours if rank == 0 else dist.TCPStore("127.0.0.1", where[0], is_master=False)
    fleet = Fleet(devices=tuple(Device(name=n, kind="cpu", threads=1) for n in NAMES))
    site, ranks = open_site(fleet.devices[rank], rehearse=False), Ranks(NAMES, NAMES[rank])
    found = []
    for number, plan in enumerate(plans):
        torch.manual_seed(0)
        job = recipe()
        job.model.train()
        meeting = Meeting(dist.PrefixStore(f"plan{number}", store), rank, world_size)
        seat = Seat(recipe=job, plan=plan, ranks=ranks, site=site, fleet=fleet, meeting=meeting, seed=0)
        layout = lay_out(seat)
        steps = Steps(seat, layout)
        grads: dict[str, torch.Tensor] = {}
        for _ in steps.run(plan.global_batch):
            pass
        steps.optimizer.register_step_pre_hook(
            lambda *_, grads=grads, held=layout.parameters: grads.update(
                {n: p.grad.clone() for n, p in held.items() if p.grad is not None}
            )
        )
        live = LiveBytes()
        with live:
            for _ in steps.run(2 * plan.global_batch):
                pass
        steps.close()
        found.append((live.peak, grads))
        dist.barrier()  # a channel that closes early would look like a lost peer
    return found


def profile() -> Profile:
    """The model's bytes, layer by layer."""
    job, cpu = recipe(), torch.device("cpu")
    return profile_model(
        model=job.model,
        step_loss=lambda model, batch: job.problem.forward(model, batch)[0],
        optimizer=job.optimizer,
        batch_of=job.batch_of,
        kind="cpu",
        driver=HardwareDriver(cpu),
        micro_batches=(1, 2),
        budget_s=1.0,
    )


def compare(num_micro_batches: int) -> tuple[dict[str, Any], list[Bar]]:
    """Peaks with and without recompute beside what was predicted, and the bars."""
    layers_measured = profile()
    layers = tuple(x.name for x in layers_measured.layers)
    edges = (0, layers.index(CUT_AFTER) + 1, len(layers))
    plans = [plan_of(layers, num_micro_batches, recompute=again) for again in (False, True)]
    by_rank = run_processes(measure, 2, plans)
    bytes_of = model_bytes(layers_measured)
    figures: dict[str, Any] = {}
    bars = []
    for stage, (name, (kept, again)) in enumerate(zip(NAMES, by_rank, strict=True)):
        first, last = edges[stage : stage + 2]
        want = [
            stage_memory(
                bytes_of, first, last, samples=MICRO_BATCH, in_flight=num_micro_batches, recompute=recompute
            )
            for recompute in (False, True)
        ]
        predicted = [m.activations + m.boundary + m.transient for m in want]
        peaks = [kept[0], again[0]]
        figures[name] = {"peak_bytes": peaks, "predicted_bytes": predicted}
        for how, peak, told in zip(("kept", "recomputed"), peaks, predicted, strict=True):
            say(f"{name}, {how}: {peak / 2**20:.1f} MiB, predicted {told / 2**20:.1f} MiB")
            bars.append(
                Bar(name=f"{name} {how}, peak off its prediction", value=off(peak, told), at_most=0.1)
            )
        saved = off(peaks[0] - peaks[1], predicted[0] - predicted[1])
        bars.append(Bar(name=f"{name}, what recompute saves off its prediction", value=saved, at_most=0.1))
        same = sum(not torch.equal(g, again[1][n]) for n, g in kept[1].items())
        bars.append(Bar(name=f"{name}, gradients that differ", value=float(same), at_most=0.0))
    return figures, bars


def off(value: float, told: float) -> float:
    """How far `value` is from what was told, as a part of that."""
    return abs(value / told - 1)


def main() -> int:
    args = parser("Does recompute lower the memory peak as predicted?").parse_args()
    figures, bars = compare(3 if args.quick else 6)
    return finish(figures, bars, as_json=args.json)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    raise SystemExit(main())
