"""What does saving beside the training cost the training while it runs?

python benchmarks/checkpoint_cost.py --json

Two processes of one thread, a byte transformer with AdamW. Steps come in blocks: a checkpoint falls at the
first step of every fourth block, the block after it has none, and the other two of four are the control. What
a checkpoint costs is the median difference within pairs of neighbouring blocks; the bar is on that difference
over the seconds that the checkpoint took, from the step boundary to the rename.
"""

import re
import sys
import tempfile
from pathlib import Path
from statistics import median, quantiles

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.common import Bar, finish, parser, say
from evener.core.fleet import Device, Fleet
from evener.core.plan import Pipeline, Plan, Share, Stage
from evener.report.metrics import read_metrics
from evener.runtime.checkpoints.folder import newest_good
from evener.session.checkpoints.save_rule import Keep, Rule
from evener.session.launching.launch import launch
from evener.session.request import Request

NAMES = ("h/a", "h/b")
SCRIPT = """
import torch, evener as ev
from torch import nn
from torch.nn.functional import cross_entropy

def recipe():
    width, length = {width}, 64
    layer = lambda: nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Embedding(256, width), *(layer() for _ in range({depth})), nn.Linear(width, 256))
    ids = torch.randint(0, 256, (512, length), generator=torch.Generator().manual_seed(0))
    return ev.Recipe(
        model=model, dataset=list(zip(ids, ids.roll(-1, 1))), global_batch={batch},
        loss=lambda out, y: cross_entropy(out.flatten(0, 1), y.flatten()),
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-4),
    )
"""


def plan_of(batch: int) -> Plan:
    """Half of the batch for each of two devices, as one micro-batch."""
    half = batch // 2
    layers = ("model",)
    pipelines = tuple(
        Pipeline(
            samples=half,
            micro_batch=half,
            stages=(Stage(layers=layers, shares=(Share(devices=(n,), samples=half),)),),
        )
        for n in NAMES
    )
    return Plan(global_batch=batch, pipelines=pipelines)


def measure(width: int, depth: int, batch: int, block: int, quads: int) -> dict[str, float]:
    """Run it; seconds by what they are."""
    with tempfile.TemporaryDirectory(prefix="evener-benchmark-", dir=".") as folder:
        script = Path(folder) / "job.py"
        script.write_text(SCRIPT.format(width=width, depth=depth, batch=batch), encoding="utf-8")
        request = Request(
            script=str(script),
            fleet=Fleet(devices=tuple(Device(name=n, kind="cpu", threads=1) for n in NAMES)),
            run_dir=folder,
            plan=plan_of(batch),
            steps=4 * block * (quads + 1),
            quiet=True,
            adapt=False,
            evaluate=False,
            checkpoint=Rule(steps=4 * block, keep=Keep(last=1)),
        )
        outcome = launch(request)
        steps = [r.step_s for r in read_metrics(Path(folder) / "metrics.jsonl").records]
        newest, _ = newest_good(Path(folder))
        assert newest is not None
        mib = newest.manifest.num_bytes / 2**20
    (told,) = (d for d in outcome.decisions if "beside the training" in d)
    found = re.search(r"^(\d+) checkpoints? .*: ([\d.]+) s each .* waited ([\d.]+) s", told)
    assert found is not None, told
    sums = [sum(steps[i : i + block]) for i in range(0, len(steps), block)][4:]
    saving = [sums[i] - sums[i + 1] for i in range(0, len(sums), 4)]
    control = [sums[i + 2] - sums[i + 3] for i in range(0, len(sums), 4)]
    return {
        "step_s": median(steps[4 * block :]),
        "checkpoint_mib": mib,
        "checkpoints": float(found[1]),
        "checkpoint_s": float(found[2]),
        "waited_s": float(found[3]),
        "cost_s": median(saving),
        "control_s": median(control),
        "cost_spread_s": spread(saving),
        "control_spread_s": spread(control),
    }


def spread(values: list[float]) -> float:
    """Half the distance between the quartiles."""
    first, _, third = quantiles(values, n=4)
    return (third - first) / 2


def main() -> int:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--quads", type=int, default=20, help="pairs of blocks to compare")
    options.add_argument("--width", type=int, default=256)
    options.add_argument("--depth", type=int, default=6)
    options.add_argument("--batch", type=int, default=8)
    options.add_argument("--block", type=int, default=6, help="steps of a block")
    chosen = options.parse_args()
    quads = 2 if chosen.quick else chosen.quads
    figures = measure(chosen.width, chosen.depth, chosen.batch, chosen.block, quads)
    share = (figures["cost_s"] - figures["control_s"]) / figures["checkpoint_s"]
    say(
        f"{figures['checkpoint_mib']:.0f} MiB in {figures['checkpoint_s']:.2f} s beside steps of "
        f"{figures['step_s']:.3f} s: {1e3 * figures['cost_s']:.1f} ± {1e3 * figures['cost_spread_s']:.1f} ms "
        f"longer, control {1e3 * figures['control_s']:.1f} ± {1e3 * figures['control_spread_s']:.1f} ms; "
        f"waited {figures['waited_s']:.3f} s in all"
    )
    bar = Bar(name="cost of saving over its duration", value=share, at_most=0.05)
    return finish(figures | {"share": share}, [bar], as_json=chosen.json)


if __name__ == "__main__":
    sys.exit(main())
