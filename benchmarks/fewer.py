"""Fewer exchanges over a slow link: seconds of a global batch and bytes between hosts, side by side.

    python benchmarks/fewer.py --json                     2 hosts of 2 processes at 100 Mbit/s, every way
    python benchmarks/fewer.py --only delayed --only local:8 --json

Hosts are network namespaces with `tc tbf` on their interfaces, as in `links.py`: needs root, iproute2.
Every way is a real run of `evener train` over the same model of 21 MB; bytes are what the interfaces of the
hosts counted between steps. Predicted are the seconds of a batch from those that a host takes by itself
(measured, in rounds longer than the run) and the formula of the cost model for an exchange over that link.
"""

import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from common import Bar, finish, parser, say  # noqa: E402

from evener.core.exchange import exchange_of  # noqa: E402
from evener.core.exchange_seconds import exchange_seconds  # noqa: E402
from evener.core.fewer import Fewer, fewer_in  # noqa: E402
from evener.core.figures import line  # noqa: E402
from evener.core.fleet import Device, Fleet, Link  # noqa: E402
from evener.core.plan import Pipeline, Plan, Reduction, Share, Stage  # noqa: E402
from evener.cost.fewer import apart_seconds  # noqa: E402
from tests.local.namespaces import Network  # noqa: E402

DEVICES = ("h1/0", "h1/1", "h2/0", "h2/1")
BY_ITSELF = "local:1000:1:0"
WAYS = ("ring", "grouped", "int8", "delayed", "local:8", "accumulate:4", BY_ITSELF)
LAYERS = ("0", "1", "2")
SCRIPT = """
import json, os, time
from pathlib import Path
import torch, evener as ev
from torch import nn

def sent():
    for line in open("/proc/self/net/dev"):
        name, _, rest = line.partition(":")
        if name.strip() == "eth0":
            return int(rest.split()[8])

def stamp(samples_seen):
    if os.environ["LOCAL_RANK"] == "0":
        with open(Path({folder!r}) / f"stamps-{{os.environ['RANK']}}", "a") as file:
            file.write(json.dumps([samples_seen, time.time(), sent()]) + "\\n")
    return 1.0

def recipe():
    torch.manual_seed(0)
    x = torch.randn(16384, 512)
    y = torch.randint(0, 2048, (16384,))
    return ev.Recipe(
        model=nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 2048)),
        dataset=torch.utils.data.TensorDataset(x, y), loss=nn.CrossEntropyLoss(), global_batch={batch},
        optimizer=lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9), schedule=stamp,
    )
"""
MODEL_BYTES = 4 * (512 * 2048 + 2048 + 2048 * 2048 + 2048)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Of one global batch."""

    batch_s: float
    batch_bytes: float
    batches: int


def plan_for(way: str, batch: int) -> Plan:
    """Half of the batch on each host, a quarter on each process."""
    fewer: Fewer | None = None
    if way.partition(":")[0] in ("accumulate", "delayed", "local"):
        (fewer,) = fewer_in((way,))
    times = fewer.every or 1 if fewer and fewer.how == "accumulate" else 1
    groups = tuple(Reduction(devices=DEVICES[i : i + 2], transport="gloo") for i in (0, 2))
    packing = "int8" if way == "int8" else None
    lanes = tuple(
        Reduction(devices=(DEVICES[i], DEVICES[i + 2]), transport="gloo", part=0.5, compression=packing)
        for i in (0, 1)
    )
    each = batch // len(DEVICES)

    def pipeline(name: str) -> Pipeline:
        stage = Stage(layers=LAYERS, shares=(Share(devices=(name,), samples=each),))
        return Pipeline(samples=each * times, micro_batch=each, stages=(stage,))

    return Plan(
        global_batch=batch * times,
        pipelines=tuple(map(pipeline, DEVICES)),
        reductions=() if way == "ring" else (*groups, *lanes),
        fewer=fewer,
    )


def train_here(folder: Path, plan: Plan, steps: int) -> None:
    """One process of the job, as torchrun starts it."""
    import torch

    from evener.session.launching.launch import run as train
    from evener.session.request import Request

    torch.set_num_threads(1)
    fleet = Fleet(devices=tuple(Device(name=d, kind="process", threads=1) for d in DEVICES))
    request = Request(
        fleet=fleet,
        script=str(folder / "script.py"),
        run_dir=str(folder),
        plan=plan,
        steps=steps,
        evaluate=False,
        quiet=True,
        elastic=False,
        preflight=False,
    )
    outcome = train(request)
    if outcome:
        print(json.dumps(outcome.decisions))


def shaped(net: Network, mbit: int) -> None:
    for host in range(1, len(net.hosts) + 1):
        net.shape_host(host, 0, mbit)


def measured(way: str, mbit: int, batch: int, periods: int) -> Measured:
    """Whole periods of a way (one batch, or from one exchange to the next), after the first."""
    plan = plan_for(way, batch)
    every = plan.fewer.every or 1 if plan.fewer and way != BY_ITSELF else 1
    warm = 8 if way == BY_ITSELF else every  # as many steps as a round has before it is measured
    with tempfile.TemporaryDirectory(prefix="evener-fewer-") as name, Network(2, 1) as net:
        folder = Path(name)
        (folder / "script.py").write_text(SCRIPT.format(folder=name, batch=batch), encoding="utf-8")
        shaped(net, mbit)
        common = {"WORLD_SIZE": "4", "MASTER_ADDR": net.address(1), "MASTER_PORT": "29200"}
        common |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
        # A step after those that count says when the last one ended.
        steps = warm + (periods + 1) * every + 1
        started = [
            net.start(
                1 + rank // 2,
                train_here,
                folder,
                plan,
                steps,
                RANK=str(rank),
                LOCAL_RANK=str(rank % 2),
                **common,
            )
            for rank in range(4)
        ]
        ends = [s.finish(170) for s in started]
        assert all(code == 0 and not err for code, _, err in ends), ends
        stamps = [[json.loads(x) for x in (folder / f"stamps-{r}").read_text().splitlines()] for r in (0, 2)]
    first, last = warm * batch, (warm + periods * every) * batch
    found = [({seen: (s, b) for seen, s, b in host}) for host in stamps]
    seconds = max(host[last][0] - host[first][0] for host in found)
    num_bytes = sum(host[last][1] - host[first][1] for host in found)
    batches = periods * every
    return Measured(batch_s=seconds / batches, batch_bytes=num_bytes / batches, batches=batches)


def predicted(way: str, mbit: int, local_s: float) -> float | None:
    """Seconds of a batch; a sum every step is taken to begin when the backward ends, at the latest."""
    curve = line(2e-4, mbit / 8 * 1e6 * 0.96)  # 0.96: what headers of Ethernet, IP and TCP leave
    inside = line(2e-4, 1e9)
    links = (
        Link(a="h1", b="h2", curve=curve),
        Link(a="h1", b="h1", curve=inside),
        Link(a="h2", b="h2", curve=inside),
    )
    fleet = Fleet(devices=tuple(Device(name=d, kind="process") for d in DEVICES), links=links)
    plan = plan_for(way, 4)
    exchange = exchange_of(plan.reductions, DEVICES)
    if exchange is None:
        return None
    exchange_s = exchange_seconds(MODEL_BYTES, exchange, fleet)
    if plan.fewer is None or plan.fewer.how == "accumulate":
        return local_s + exchange_s / (plan.fewer.every or 1 if plan.fewer else 1)
    return apart_seconds(plan.fewer, local_s, exchange_s)


def main() -> int:
    p = parser(__doc__)
    p.add_argument("--only", action="append", help=f"one of {', '.join(WAYS)}, or another number")
    p.add_argument("--mbit", type=int, default=100)
    p.add_argument("--batch", type=int, default=2048, help="samples of a global batch")
    p.add_argument(
        "--periods", type=int, default=4, help="measured: batches, or rounds from exchange to next"
    )
    options = p.parse_args()
    ways = [*(options.only or WAYS)]
    if BY_ITSELF not in ways:
        ways.append(BY_ITSELF)
    periods = 1 if options.quick else options.periods
    found: dict[str, Measured] = {}
    for way in ways:
        several = 1 if way.startswith(("local:8", "accumulate")) else periods
        found[way] = measured(way, options.mbit, options.batch, several)
    local_s = found[BY_ITSELF].batch_s
    rows: dict[str, Any] = {}
    for way, told in found.items():
        expected = predicted(way, options.mbit, local_s) if way != BY_ITSELF else None
        rows[way] = {
            "batch_s": told.batch_s,
            "predicted_batch_s": expected,
            "between_bytes": told.batch_bytes,
            "batches": told.batches,
        }
        beside = f", predicted {expected:6.3f} s ({expected / told.batch_s - 1:+.1%})" if expected else ""
        say(f"{way:16} {told.batch_s:6.3f} s a batch{beside}, {told.batch_bytes / 1e6:7.3f} MB between hosts")
    bars = []
    if {"grouped", "local:8"} <= set(found):
        sync, local = found["grouped"], found["local:8"]
        bars.append(
            Bar(name="grouped over local:8, bytes", value=sync.batch_bytes / local.batch_bytes, at_least=7.0)
        )
        bars.append(
            Bar(name="grouped over local:8, seconds", value=sync.batch_s / local.batch_s, at_least=1.5)
        )
    if {"grouped", "delayed"} <= set(found):
        bars.append(
            Bar(
                name="delayed over the larger of computing and exchange",
                value=found["delayed"].batch_s / (predicted("delayed", options.mbit, local_s) or 1.0),
                at_most=1.15,
            )
        )
    return finish(
        {"mbit": options.mbit, "batch": options.batch, "model_bytes": MODEL_BYTES, "ways": rows},
        bars,
        as_json=options.json,
    )


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
