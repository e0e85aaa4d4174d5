"""Options that several verbs share, each defined once."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from evener.core.budgets import SPELLING
from evener.core.job import MAX_SAMPLES, MOST_MARGIN, Shapes, State, Sums
from evener.errors import UsageError

Precision = Literal["float32", "bfloat16", "float16"]

FleetFile = Annotated[
    Path, typer.Argument(help="Fleet file, from `evener probe` or by hand; kinds alone may do.")
]
ProfileFile = Annotated[
    Path | None, typer.Argument(help="Profile file, from `evener profile`; not with --model.")
]
Batch = Annotated[
    int | None, typer.Option("--batch", "-b", min=1, max=MAX_SAMPLES, help="Samples of an optimiser step.")
]
Model = Annotated[
    str | None,
    typer.Option(help="Instead of a profile: gpt3-175b, llama-3-8b, gpt2, ... or a JSON configuration."),
]
ModelPrecision = Annotated[Precision, typer.Option(help="Of the matrix products, with --model.")]
MicroBatch = Annotated[int | None, typer.Option(min=1, help="Samples a device computes at once.")]
BatchPerDevice = Annotated[
    str | None,
    typer.Option(help="Your own split: 2,2,2,15 in the order of the fleet, or host/gpu0=2,host/cpu=15."),
]
Memory = Annotated[
    list[str] | None,
    typer.Option(
        "--memory", help=f"Use no more of a device's (or host CPU's) memory: {SPELLING}. May be repeated."
    ),
]
MemoryMargin = Annotated[
    float, typer.Option(min=0, max=MOST_MARGIN, help="Part of each memory that stays free.")
]
KeepAll = Annotated[bool, typer.Option("--keep-all", help="Use every device, also one that slows the job.")]
ShapesWanted = Annotated[
    Shapes, typer.Option(help="What to consider; auto: pipelines only if no device holds the model.")
]
Allow = Annotated[
    list[str] | None,
    typer.Option(help="Also allow: tensor-parallel, or unlinked (data without a link costs nothing)."),
]
SumsWanted = Annotated[
    Sums, typer.Option("--sums", help="How gradients are summed; auto: what is predicted fastest.")
]
StateWanted = Annotated[
    State,
    typer.Option(
        "--state",
        help="What devices keep in unequal parts by memory: only the optimizer's state, gradients too, "
        "parameters too; auto: the fastest that fits, where memory is short; replicated: nothing.",
    ),
]
Parts = Annotated[
    str | None,
    typer.Option(help="The parts of --state yourself: 5,3,2 in the order of the fleet, or lab1/gpu0=5,..."),
]
Compress = Annotated[
    str | None,
    typer.Option(
        help="What gradients may go as between hosts where that is predicted faster: bf16, fp16, int8, int4, "
        "top1%, powersgd1, powersgd2, powersgd4; several with commas. Not exact: the plan says so."
    ),
]
FewerExchanges = Annotated[
    str | None,
    typer.Option(
        "--fewer",
        help="How hosts may exchange less often than once a step where that is predicted faster: "
        "accumulate:4 (one step for 4 global batches), delayed (by one step), local:16 (16 steps a host by "
        "itself, then an outer step); several with commas. Not exact: the plan says what it does.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="End standard output with one line: a JSON object.")]
RunFolder = Annotated[Path, typer.Argument(help="Folder of a run, as evener train names it.")]
Serve = Annotated[
    bool, typer.Option("--serve", help="Show the run live on a page (extra: web), see --listen.")
]
ListenAt = Annotated[
    str | None,
    typer.Option(
        "--listen",
        help="--serve at HOST:PORT (default 127.0.0.1:0, any free port). Beyond this machine a token is "
        "needed: EVENER_TOKEN, or one is made and printed.",
    ),
]
SERVED_AT = "127.0.0.1:0"
LogTo = Annotated[
    list[str] | None,
    typer.Option(help="Also write to: tensorboard, wandb (offline unless WANDB_MODE says otherwise)."),
]
Rehearse = Annotated[
    Path | None, typer.Option(help="A fleet file to rehearse here: one paced process per device.")
]
RealLinks = Annotated[
    bool,
    typer.Option(
        "--real-links",
        help="With --rehearse, as root on Linux: every host of the fleet file is a network namespace, and "
        "between hosts everything goes over real sockets and links shaped with tc.",
    ),
]
Devices = Annotated[
    str | None, typer.Option(help="Only these: cuda:1,cuda:3 here, or names of the fleet file.")
]
Weights = Annotated[
    Path | None,
    typer.Option(exists=True, help="Start from these: a safetensors file or the folder of a run."),
]
Adapt = Annotated[
    bool,
    typer.Option("--adapt/--no-adapt", help="Move work when devices turn out faster or slower."),
]
Steal = Annotated[
    bool, typer.Option("--steal", help="A device that is done takes waiting work of a slower one.")
]
Faults = Annotated[str, typer.Option(help="Scripted trouble: 'slow lab1/a x3 at step 40; oom lab1/b at 60'.")]
Noise = Annotated[
    float | None,
    typer.Option(
        min=0, max=100, help="Draw the time of each paced action with a heavy tail: 0.5 is half more."
    ),
]
SamplesAtOnce = Annotated[
    int | None,
    typer.Option(min=1, help="Samples at once on a device (default: the planner's choice)."),
]
WithCpu = Annotated[
    bool,
    typer.Option(
        "--with-cpu",
        help="Offer the host's CPU as one more device beside its accelerators, with the threads that they, "
        "data loading and tables leave; left out, with the sum that shows why, where it would not pay.",
    ),
]
Place = Annotated[
    list[str] | None,
    typer.Option(
        help="Where embedding tables lie: emb=cpu, emb=device, emb=dense, emb=auto (what the planner finds "
        "fastest that fits), auto for all of them. May be repeated; goes before the recipe's place."
    ),
]
MAX_SEED = 2**63 - 1  # what every generator takes
Seed = Annotated[
    int | None,
    typer.Option(
        min=0, max=MAX_SEED, help="Seed of weights, order and noise (default 0, or that of --resume)."
    ),
]
CheckpointEvery = Annotated[
    str | None, typer.Option(help="Save every so many steps (200) or a time (90s, 10min, 2h).")
]
KeepCheckpoints = Annotated[int, typer.Option(min=1, help="How many of the newest checkpoints stay.")]
KeepEvery = Annotated[int, typer.Option(min=0, help="Every so-many-th checkpoint stays for good; 0: none.")]
Resume = Annotated[
    str | None,
    typer.Option(help="Go on from a run's folder, a checkpoint's, or latest: this run's own, if it has one."),
]
ProfileStep = Annotated[
    int | None,
    typer.Option(min=0, help="Profile this step with torch's profiler on every device: profiled-step.json."),
]
Join = Annotated[
    str | None,
    typer.Option(help="HOST:PORT of a running job, as it printed it: take part with one device."),
]
TokenFile = Annotated[
    Path | None, typer.Option(help="With --join: the file join-token of that job's run folder.")
]
OpenAt = Annotated[
    str,
    typer.Option(
        help="HOST:PORT where others may join with the token; port 0: any. Other hosts only reach an address "
        "of this one that they can route to, and whoever can reach it can reach the job's store: trusted "
        "networks only."
    ),
]
Preflight = Annotated[
    bool | None,
    typer.Option(
        "--preflight/--no-preflight",
        help="First try every pair of processes with real data; default: for jobs on several hosts.",
    ),
]
Elastic = Annotated[
    bool,
    typer.Option("--elastic/--no-elastic", help="Go on when a device is lost; let devices leave and join."),
]
CopyEvery = Annotated[
    int,
    typer.Option(
        min=0, help="Steps between copies of what only one device holds, to a neighbour's memory; 0: never."
    ),
]


_PLACES = ("cpu", "device", "dense", "auto")


def places_in(words: list[str]) -> dict[str, str]:
    """Places by table; UsageError for what is none, and for two places of one table.

    Example: ["auto", "emb=cpu"] gives {"*": "auto", "emb": "cpu"}.
    """
    found: dict[str, str] = {}
    for word in words:
        name, equals, where = word.partition("=")
        if not equals:
            name, where = "*", word
        if not name or where not in _PLACES:
            raise UsageError(
                f"cannot read the place {word!r}",
                remedy=f"TABLE=PLACE, or PLACE alone for all tables, with one of {', '.join(_PLACES)}; files "
                'and weights by device are said in the recipe: place={"emb": {"file": FOLDER, "rows": N}}',
            )
        if name in found:
            whose = "all tables" if name == "*" else f"the table {name}"
            raise UsageError(
                f"--place says two places of {whose}: {found[name]} and {where}", remedy="one of them"
            )
        found[name] = where
    return found


def names_in(text: str | None) -> tuple[str, ...]:
    """The words of a list with commas. Example: "bf16, int8" gives ("bf16", "int8")."""
    return tuple(w.strip() for w in (text or "").split(",") if w.strip())
