"""What fewer exchanges do to training: the text example's held-out loss after the same samples, and bytes.

    python benchmarks/fewer_loss.py --json                        local steps beside one sum a step
    python benchmarks/fewer_loss.py --way delayed --way local:16 --json

Two processes stand for two hosts with uneven work (150 and 90 of 240 windows); each run is a real one of
`evener train` from the same weights over the same samples.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from common import TEXT, Bar, finish, parser, say  # noqa: E402

from evener.core.exchange import exchange_of  # noqa: E402
from evener.core.fewer import Fewer, fewer_in  # noqa: E402
from evener.core.fleet import Device, Fleet  # noqa: E402
from evener.core.plan import Pipeline, Plan, Reduction, Share, Stage  # noqa: E402
from evener.cost.fewer import bytes_between  # noqa: E402
from evener.session.launching.launch import launch  # noqa: E402
from evener.session.recipe import load_recipe  # noqa: E402
from evener.session.request import Request  # noqa: E402

SYNC = "one sum a step"
PARTS = {"h1/cpu": 5, "h2/cpu": 3}  # of 8 samples


def plan_for(way: str, batch: int, layers: tuple[str, ...]) -> Plan:
    fewer: Fewer | None = fewer_in((way,))[0] if way != SYNC else None
    times = fewer.every or 1 if fewer and fewer.how == "accumulate" else 1
    at_once = min(30, batch // 8)

    def pipeline(name: str, part: int) -> Pipeline:
        stage = Stage(layers=layers, shares=(Share(devices=(name,), samples=at_once),))
        return Pipeline(samples=batch // 8 * part * times, micro_batch=at_once, stages=(stage,))

    return Plan(
        global_batch=batch * times,
        pipelines=tuple(pipeline(name, part) for name, part in PARTS.items()),
        reductions=(Reduction(devices=tuple(PARTS), transport="gloo", part=1.0),),
        fewer=fewer,
    )


def trained(way: str, batch: int, steps: int) -> dict[str, Any]:
    """Held-out loss before and after, and bytes between the two hosts."""
    recipe = load_recipe(str(TEXT), 0)
    plan = plan_for(way, batch, tuple(name for name, _ in recipe.model.named_children()))
    exchange = exchange_of(plan.reductions, plan.devices)
    assert exchange is not None
    num_bytes = 4 * sum(p.numel() for p in recipe.model.parameters() if p.requires_grad)
    with tempfile.TemporaryDirectory(prefix="evener-fewer-") as folder:
        request = Request(
            fleet=Fleet(devices=tuple(Device(name=d, kind="process", threads=1) for d in PARTS)),
            script=str(TEXT),
            run_dir=folder,
            plan=plan,
            steps=steps,
            global_batch=batch,
            quiet=True,
            elastic=False,
            preflight=False,
        )
        outcome = launch(request)
    assert outcome is not None and outcome.heldout_loss is not None
    for sentence in outcome.decisions:
        say(f"  {sentence}")
    every = plan.fewer.every or 1 if plan.fewer else 1
    exchanges = -(-steps // every)
    found = {
        "heldout_before": outcome.heldout_first,
        "heldout_loss": outcome.heldout_loss,
        "exchanges": exchanges,
        "between_bytes": exchanges * bytes_between(num_bytes, exchange),
    }
    sent = found["between_bytes"] / 1e6
    say(f"{way}: held-out loss {outcome.heldout_loss:.4f}, {sent:.2f} MB between hosts")
    return found


def main() -> int:
    p = parser(__doc__)
    p.add_argument("--way", action="append", help="ways beside one sum a step; default local:8")
    p.add_argument("--steps", type=int, default=120, help="global batches")
    p.add_argument("--batch", type=int, default=240)
    p.add_argument("--sync", type=float, help="held-out loss of one sum a step, from an earlier run")
    options = p.parse_args()
    steps = 4 if options.quick else options.steps
    ways = options.way or ["local:8"]
    first = [] if options.sync else [SYNC]
    found = {way: trained(way, options.batch, steps) for way in first + ways}
    exact = options.sync or found[SYNC]["heldout_loss"]
    off = {way: abs(found[way]["heldout_loss"] / exact - 1) for way in ways}
    bars = [Bar(name=f"{way}: held-out loss, off by", value=x, at_most=0.02) for way, x in off.items()]
    return finish({"steps": steps, "batch": options.batch, "ways": found}, bars, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
