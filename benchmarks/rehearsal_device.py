"""How well does the rehearsal device keep time and count memory, and what does it cost?

python benchmarks/rehearsal_device.py --json            all parts
python benchmarks/rehearsal_device.py chain copies      some of them

overhead   what an operation costs beyond the same one on CPU tensors
chain      products and additions against the roofline, beside two busy processes, by the wall clock
copies     copies beside the computing and after it, as computed
loaded     a training step on an idle machine and beside two busy processes
counter    the device's peak against torch's profiler of the same step on CPU tensors
largest    the largest micro-batch that the planner allows, and the largest that fits
"""

import copy
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.common import Bar, finish, parser, run_processes, say
from benchmarks.rehearsal_models import Block, make
from evener.core.catalogue import FleetFile, FleetLine, resolved
from evener.core.figures import Figure, line
from evener.core.fleet import Device, Fleet
from evener.core.job import Job
from evener.cost.evaluate import CostModel
from evener.cost.memory import usable_bytes

FLOPS, BYTES_PER_S, LAUNCH_S = 2e9, 1e9, 2e-4


def figure(value: float) -> Figure:
    """A figure of the benchmark's own."""
    return Figure(value=value, source="assumed")


def opened(*, counts: bool = True, flops: float = 1e15, bytes_per_s: float = 1e15, launch_s: float = 1e-12,
           link_bytes_per_s: float | None = None) -> Any:  # fmt: skip
    """The device of this process, with these rates."""
    from evener.rehearsal.device.backend import open_card
    from evener.rehearsal.device.clock import Clock

    device = Device(
        name="lab/gpu0",
        kind="benchmark",
        type="cuda",
        flops={"float32": figure(flops)},
        bytes_per_s=figure(bytes_per_s),
        launch_s=figure(launch_s),
    )
    link = line(1e-5, link_bytes_per_s, source="assumed") if link_bytes_per_s else None
    return open_card(device, link, clock=Clock(host_counts=counts))


def overhead(rank: int, world_size: int, rounds: int) -> dict[str, float]:
    """Microseconds an operation: forward alone, and over a training step of two layers of a transformer."""
    card = opened()

    def each(where: str) -> float:
        x = torch.ones(8, device=where)
        best = float("inf")
        for _ in range(rounds):
            begin_s = time.perf_counter()
            for _ in range(1000):
                x + x
            best = min(best, (time.perf_counter() - begin_s) / 1000)
        return best

    forward_s = each("rehearsal") - each("cpu")
    layers = nn.Sequential(Block(64), Block(64))
    twin = copy.deepcopy(layers).to("rehearsal")
    x = torch.randn(2, 16, 64)
    y = x.to("rehearsal")

    def step(model: nn.Module, batch: torch.Tensor) -> float:
        begin_s = time.perf_counter()
        model(batch).square().mean().backward()
        return time.perf_counter() - begin_s

    for model, batch in ((layers, x), (twin, y)):
        step(model, batch)
    before = card.num_calls
    step(twin, y)
    num_ops = card.num_calls - before
    pairs = [(step(layers, x), step(twin, y)) for _ in range(20 * rounds)]
    cpu_s, device_s = (statistics.median(column) for column in zip(*pairs, strict=True))
    return {
        "forward_us": forward_s * 1e6,
        "step_us": (device_s - cpu_s) / num_ops * 1e6,
        "operations": num_ops,
    }


def chain(rank: int, world_size: int, rounds: int) -> dict[str, float]:
    """Seconds of 20 products and additions by the wall clock, over what the roofline says."""
    opened(flops=FLOPS, bytes_per_s=BYTES_PER_S, launch_s=LAUNCH_S)
    x, y = (torch.ones(256, 256, device="rehearsal") for _ in range(2))
    product_s = max(2 * 256**3 / FLOPS, 3 * 256 * 256 * 4 / BYTES_PER_S) + LAUNCH_S
    computed_s = 20 * (product_s + 3 * 256 * 256 * 4 / BYTES_PER_S + LAUNCH_S)
    (x @ y + x).sum().item()
    ratios, queued = [], []
    for _ in range(rounds):
        torch.accelerator.synchronize()
        begin_s = time.monotonic()
        z = x
        for _ in range(20):
            z = z @ y
            z = z + x
        queued.append((time.monotonic() - begin_s) / computed_s)
        torch.accelerator.synchronize()
        ratios.append((time.monotonic() - begin_s) / computed_s)
    return {
        "computed_s": computed_s,
        "ratio": statistics.median(ratios),
        "worst": max(ratios),
        "queued_part": statistics.median(queued),
    }


def copies(rank: int, world_size: int, rounds: int) -> dict[str, float]:
    """Wall seconds over computed ones, of a copy after a product and of one beside it."""
    opened(flops=1e9, link_bytes_per_s=2e7)
    x = torch.ones(100, 1000, device="rehearsal")
    w = torch.ones(1000, 1000, device="rehearsal")
    pinned = torch.ones(1_000_000).pin_memory()
    compute_s, copy_s = 2 * 100 * 1000 * 1000 / 1e9, 1e-5 + 4e6 / 2e7

    def after() -> None:
        _ = x @ w
        pinned.to("rehearsal", non_blocking=True)

    def beside() -> None:
        _ = x @ w
        with torch.Stream("rehearsal"):
            pinned.to("rehearsal", non_blocking=True)

    def taken(work: Callable[[], None]) -> float:
        found = []
        for _ in range(rounds):
            torch.accelerator.synchronize()
            begin_s = time.monotonic()
            work()
            torch.accelerator.synchronize()
            found.append(time.monotonic() - begin_s)
        return statistics.median(found)

    return {
        "after": taken(after) / (compute_s + copy_s),
        "beside": taken(beside) / max(compute_s, copy_s),
        "after_computed_s": compute_s + copy_s,
        "beside_computed_s": max(compute_s, copy_s),
    }


def training(rank: int, world_size: int, rounds: int) -> tuple[float, float]:
    """Seconds of a training step as a rehearsed run takes it: on the device's clock, and on the wall's."""
    from evener.rehearsal.device.driver import CardDriver

    card = opened(counts=False, flops=5e8, bytes_per_s=5e8, launch_s=1e-4)
    driver = CardDriver(card)
    recipe = make("tables", "adamw")
    model = recipe.model.to("rehearsal")
    optimizer = recipe.optimizer(model.parameters())
    x, y = recipe.batch_of(16)
    x, y = x.to("rehearsal"), y.to("rehearsal")
    seconds: list[float] = []
    own: list[float] = []
    for _ in range(rounds):
        begin_s, own_s = time.monotonic(), driver.now()
        loss = driver.run("0F0", lambda: nn.functional.cross_entropy(model(x), y))
        driver.run("0B0", loss.backward)
        driver.run("STEP", optimizer.step)
        optimizer.zero_grad(set_to_none=False)
        seconds.append(time.monotonic() - begin_s)
        own.append(driver.now() - own_s)
    return statistics.median(own[2:]), statistics.median(seconds[2:])


def counter(rank: int, world_size: int, rounds: int) -> dict[str, float]:
    """Peaks of a training step of several models: the device's counter over the profiler's."""
    opened()
    found = {}
    for name in ("language", "images", "tables"):
        recipe = make(name, "sgd")
        twin = copy.deepcopy(recipe.model).to("rehearsal")
        x, y = recipe.batch_of(16)

        def step(model: nn.Module, device: str, x: Any = x, y: Any = y, recipe: Any = recipe) -> None:
            recipe.problem.loss(model(x.to(device)), y.to(device)).backward()

        step(recipe.model, "cpu")
        with torch.profiler.profile(profile_memory=True) as profiler:
            step(recipe.model, "cpu")
        now = peak = 0
        for event in profiler.profiler.kineto_results.events():
            if event.name() == "[memory]":
                now += event.nbytes()
                peak = max(peak, now)
        step(twin, "rehearsal")
        before = torch.accelerator.memory_stats()["requested_bytes.all.current"]
        torch.accelerator.reset_peak_memory_stats()
        step(twin, "rehearsal")
        counted = torch.accelerator.memory_stats()["requested_bytes.all.peak"] - before
        found[name] = counted / peak
    return found


def small_card(fleet_bytes: float) -> Fleet:
    """An RTX 3060 with so much memory."""
    file = FleetFile(
        devices=(Device(name="lab/gpu0", kind="RTX 3060", memory_bytes=figure(fleet_bytes)),),
        links=(FleetLine(a="lab", b="lab", kind="PCIe 4.0 x16"),),
    )
    fleet = resolved(file, "here").as_rehearsed()
    from msgspec.structs import replace

    from evener.core.fleet import Rehearsed

    device = replace(fleet.devices[0], framework_bytes=None, rehearsed=Rehearsed(smaller=1024.0))
    return replace(fleet, devices=(device,))


def largest(rank: int, world_size: int, rounds: int) -> dict[str, float]:
    """(allowed by the planner without a margin, really fitting) micro-batches of a language model."""
    from evener.session.planning.measure import micro_batch_grid, profile_here
    from evener.session.site import open_site

    fleet = small_card(24e6)
    device = fleet.devices[0]
    site = open_site(device, rehearse=True, fleet=fleet)
    profile = profile_here(make("language", "adamw"), site, micro_batch_grid(64), 20.0)
    step = CostModel(fleet=fleet, profile=profile).step(device.kind)
    assert step is not None
    allowed = step.largest_within(usable_bytes(device, Job(global_batch=1, memory_margin=0.0).memory_margin))
    recipe = make("language", "adamw", global_batch=64)
    model = recipe.model.to("rehearsal")
    optimizer = recipe.optimizer(model.parameters())

    def fits(size: int) -> bool:
        try:
            for _ in range(2):
                x, y = recipe.batch_of(size)
                loss = recipe.problem.loss(model(x.to("rehearsal")), y.to("rehearsal"))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
            return True
        except torch.OutOfMemoryError as e:
            e.__traceback__ = None
            return False
        finally:
            loss = None
            torch.accelerator.empty_cache()

    real = 0
    while fits(real + 1):
        real += 1
    return {"allowed": allowed, "fits": real}


def spin() -> None:
    """Keep a core busy."""
    while True:
        sum(range(10_000))


def beside_others(num: int, work: Callable[[], Any]) -> Any:
    """`work()` while `num` processes keep the cores busy."""
    busy = [multiprocessing.get_context("forkserver").Process(target=spin, daemon=True) for _ in range(num)]
    for process in busy:
        process.start()
    try:
        time.sleep(0.5 if busy else 0)
        return work()
    finally:
        for process in busy:
            process.kill()
            process.join()


def one(fn: Callable[..., Any], rounds: int) -> Any:
    """`fn` in a process of its own."""
    return run_processes(fn, 1, rounds)[0]


def part_overhead(rounds: int) -> tuple[Any, list[Bar]]:
    found = one(overhead, rounds)
    say(f"overhead: {found['forward_us']:.1f} µs an operation forward, {found['step_us']:.1f} over a step")
    worst = max(found["forward_us"], found["step_us"])
    return found, [Bar(name="overhead of an operation, µs", value=worst, at_most=60)]


def part_chain(rounds: int) -> tuple[Any, list[Bar]]:
    found = {f"{n} busy": beside_others(n, lambda: one(chain, rounds)) for n in (0, 2)}
    for name, row in found.items():
        say(f"chain, {name}: {row['ratio']:.4f} of the roofline's {row['computed_s'] * 1e3:.1f} ms")
    bars = [Bar(name=f"chain, {n}, off", value=abs(r["ratio"] - 1), at_most=0.03) for n, r in found.items()]
    return found, bars


def part_copies(rounds: int) -> tuple[Any, list[Bar]]:
    found = one(copies, rounds)
    say(f"copies: after {found['after']:.4f}, beside {found['beside']:.4f} of what is computed")
    return found, [
        Bar(name=f"copy {n}, off", value=abs(found[n] - 1), at_most=0.03) for n in ("after", "beside")
    ]


def part_loaded(rounds: int) -> tuple[Any, list[Bar]]:
    idle, loaded = (beside_others(n, lambda: one(training, 3 * rounds)) for n in (0, 2))
    for name, (own_s, wall_s) in (("alone", idle), ("beside two busy processes", loaded)):
        say(f"loaded: {own_s * 1e3:.2f} ms a step rehearsed, {wall_s * 1e3:.2f} on the wall, {name}")
    found = {"idle_s": idle[0], "loaded_s": loaded[0], "idle_wall_s": idle[1], "loaded_wall_s": loaded[1]}
    return found, [Bar(name="loaded over idle, off", value=abs(loaded[0] / idle[0] - 1), at_most=0.03)]


def part_counter(rounds: int) -> tuple[Any, list[Bar]]:
    found = one(counter, rounds)
    say("counter: " + ", ".join(f"{n} {r:.4f}" for n, r in found.items()) + " of the profiler's peak")
    worst = max(abs(r - 1) for r in found.values())
    return found, [Bar(name="counter against profiler, off", value=worst, at_most=0.1)]


def part_largest(rounds: int) -> tuple[Any, list[Bar]]:
    found = one(largest, rounds)
    say(f"largest: {found['allowed']} samples allowed, {found['fits']} fit")
    away = abs(found["allowed"] - found["fits"])
    return found, [Bar(name="largest micro-batch, samples off", value=away, at_most=1)]


PARTS = {
    "overhead": part_overhead,
    "chain": part_chain,
    "copies": part_copies,
    "loaded": part_loaded,
    "counter": part_counter,
    "largest": part_largest,
}


def main() -> int:
    """The parts that were asked for, or all."""
    p = parser(str(__doc__))
    p.add_argument("parts", nargs="*", choices=[*PARTS, []], help="which figures; all where none is named")
    options = p.parse_args()
    figures, bars = {}, []
    for name in options.parts or PARTS:
        figures[name], more = PARTS[name](2 if options.quick else 7)
        bars += more
    return finish(figures, [] if options.quick else bars, as_json=options.json)


if __name__ == "__main__":
    raise SystemExit(main())
