"""Does bfloat16 on one device and float32 on another train the text example as float32 does?

python benchmarks/precision.py --json

The same 40 steps over the same uneven pipeline of two unpaced devices, with and without bfloat16 in the
stage of one of them. The held-out loss is compared: the mean over 512 windows of text not trained on.
"""

import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.common import TEXT, Bar, finish, fleet_named, parser, say
from evener.core.plan import Pipeline, Plan, Share, Stage
from evener.session.journal import Outcome
from evener.session.launching.launch import launch
from evener.session.request import Request

FIRST = ("(root)", "embed", "embed_before", "blocks.0")
LAST = ("blocks.1", "norm", "head")
NAMES = ("lab1/a", "lab1/b")
GLOBAL_BATCH, MICRO_BATCH = 240, 60


def train(precision: tuple[str | None, str | None], steps: int) -> Outcome:
    """The text example over two stages with these precisions."""
    stages = tuple(
        Stage(layers=layers, shares=(Share(devices=(name,), samples=MICRO_BATCH),), precision=how)
        for layers, name, how in zip((FIRST, LAST), NAMES, precision, strict=True)
    )
    pipeline = Pipeline(samples=GLOBAL_BATCH, micro_batch=MICRO_BATCH, stages=stages)
    with tempfile.TemporaryDirectory(prefix="evener-benchmark-") as folder:
        request = Request(
            script=str(TEXT),
            fleet=fleet_named("8-4-2-2").only(NAMES),
            plan=Plan(global_batch=GLOBAL_BATCH, pipelines=(pipeline,), schedule="1f1b"),
            steps=steps,
            run_dir=folder,
            quiet=True,
        )
        return launch(request)


def main() -> int:
    args = parser("Does bfloat16 on one device train as float32 does?").parse_args()
    steps = 2 if args.quick else 40
    plain = train((None, None), steps)
    assert plain.heldout_loss is not None
    figures = {"steps": steps, "heldout_first": plain.heldout_first, "float32": plain.heldout_loss}
    say(f"float32: {plain.heldout_first:.4f} → {plain.heldout_loss:.4f}")
    bars = []
    for where, precision in (("first", ("bfloat16", None)), ("last", (None, "bfloat16"))):
        mixed = train(precision, steps)
        assert mixed.heldout_loss is not None
        name = f"bfloat16 on the {where} device"
        figures[name] = mixed.heldout_loss
        say(f"{name}: {mixed.heldout_loss:.4f}; {'; '.join(mixed.plan.inexact)}")
        off = abs(mixed.heldout_loss / plain.heldout_loss - 1)
        bars.append(Bar(name=f"{name}, held-out loss off float32's", value=off, at_most=0.02))
    return finish(figures, bars, as_json=args.json)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    raise SystemExit(main())
