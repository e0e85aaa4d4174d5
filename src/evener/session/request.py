"""What is asked of a run: the same small value in every process of a job, passed on as JSON."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from msgspec.structs import replace

from evener.core.claim import CLAIM
from evener.core.faults import FaultScript
from evener.core.fewer import fewer_in
from evener.core.figures import Value
from evener.core.fleet import Device, Fleet, Link
from evener.core.job import Shapes, State, Sums, check_together
from evener.core.ownership import check_owners
from evener.core.plan import Plan
from evener.core.profile import Profile
from evener.errors import FileError, UsageError
from evener.planner.tables import CPU, DENSE, DEVICE
from evener.session.checkpoints.save_rule import Rule

MAX_SEED = 2**63 - 1  # what every generator takes


LATEST = "latest"
"""What `resume` says for the run's own newest checkpoint, if it has one."""
TOKEN_FILE = "join-token"
UNREAD = {CLAIM, TOKEN_FILE}  # files of a run's folder that are of no use once the run has ended


class Later(Value, frozen=True, kw_only=True):
    """A device of the fleet file that joins from step `from_step` on, and its links."""

    device: Device
    from_step: int
    links: tuple[Link, ...] = ()


class Prediction(Value, frozen=True, kw_only=True):
    """Outputs instead of training: for which samples, to which file, and whether with loss and metrics."""

    data: Literal["heldout", "dataset"] = "heldout"
    out: str = ""
    score: bool = False


class Request(Value, frozen=True, kw_only=True):
    """A training run: what to train, how long, on which devices and where its files go.

    `fleet` has one device per process, in order; `profile_s` bounds the seconds of measuring. `weights` is a
    safetensors file that every process reads before the first step. `checkpoint` says when to save, `resume`
    is a run or checkpoint to go on from ("latest": this run's own, where it has one). `adapt` lets measured
    speeds change who does what; `faults` are scripted and `noise` disturbs rehearsed devices, see
    `session/loop/scripted.py`. For `verify`, `dtype` overrides the model's, `keep_gradient` writes the first
    gradient to the run folder, and `dropout` can be off. `profile_step` is the step that torch's profiler
    sees. With `elastic` the job goes on when a device is lost; before each `snapshot_every`-th step devices
    copy what only one of them holds (0: never). Those of `later` join in mid-run, others at `open_at`.
    `place` has places of tables that go before the recipe's. With `real_links` each host of a rehearsal is a
    network namespace of its own, see `session/launching/grounds.py`.
    """

    fleet: Fleet
    run_dir: str
    script: str = ""
    rehearse: bool = False
    real_links: bool = False
    steps: int | None = None
    epochs: float | None = None
    global_batch: int | None = None
    micro_batch: int | None = None
    batch_per_device: dict[str, int] | None = None
    plan: Plan | None = None
    profile: Profile | None = None
    even: bool = False
    keep_all: bool = False
    shapes: Shapes = "auto"
    weights: str | None = None
    seed: int = 0
    evaluate: bool = True
    adapt: bool = True
    sums: Sums = "auto"
    compress: tuple[str, ...] = ()  # what may be used between hosts
    fewer: tuple[str, ...] = ()  # how hosts may exchange less often: "local:16"
    place: dict[str, str] = {}
    steal: bool = False  # devices take each other's micro-batches within a step
    state: State = "replicated"  # what devices keep only their part of
    parts: dict[str, int] | None = None  # of state, by device in proportion; None: by memory
    faults: FaultScript = FaultScript()
    noise: float | None = None
    profile_s: float = 20.0
    dtype: Literal["float32", "float64"] | None = None
    keep_gradient: bool = False
    dropout: bool = True
    quiet: bool = False
    checkpoint: Rule | None = None
    resume: str | None = None
    elastic: bool = True
    snapshot_every: int = 10
    predict: Prediction | None = None
    later: tuple[Later, ...] = ()
    open_at: str = "127.0.0.1:0"
    preflight: bool | None = None  # None: where devices are on several hosts
    profile_step: int | None = None

    def __post_init__(self) -> None:
        check_faults(self)
        if self.plan:  # its layers are known to the recipe alone
            check_owners(self.plan, [o.layer for o in self.plan.owners])
        check_together(self.state, self.sums, self.compress, fewer_in(self.fewer))
        negative = [f"{name}={part}" for name, part in (self.parts or {}).items() if part < 0]
        if negative:
            raise UsageError(
                f"--parts has {', '.join(negative)}", remedy="numbers of 0 or more, not all 0: 5,3,2"
            )
        if not 0 <= self.seed <= MAX_SEED:
            raise UsageError(f"the seed is {self.seed}", remedy=f"a whole number from 0 to {MAX_SEED}")
        if self.steps is not None and self.steps < 1:
            raise UsageError(f"{self.steps} steps train nothing", remedy="1 step or more")
        if self.epochs is not None and not 0 < self.epochs < float("inf"):
            raise UsageError(
                f"{self.epochs:g} epochs cannot be trained",
                remedy="a number above 0: 0.5 is half of the data",
            )


def may_hold_parts(request: Request) -> bool:
    """Whether state may be held in parts in this run: nobody else has the part of a lost device then."""
    return request.state != "replicated" or bool(request.plan and request.plan.owners)


def may_change_devices(request: Request) -> bool:
    """Whether devices may leave and join, so far as that is known before the recipe is read.

    Not where only one device has a part of the state, rows of a table or a group's weights.
    """
    plan = request.plan
    fewer = ((plan.fewer,) if plan.fewer else ()) if plan else fewer_in(request.fewer)
    placed = any(where in (CPU, DEVICE) for table, where in request.place.items() if table != "*")
    placed = placed or any(t.residence != DENSE for t in (plan.tables if plan else ()))
    apart = any(f.parts_hosts for f in fewer)
    return request.elastic and not (may_hold_parts(request) or placed or apart)


def check_faults(request: Request) -> None:
    """UnknownNameError for a fault on a device that is not there; UsageError for what only a rehearsal can
    do.
    """
    hosts = {d.host for d in request.fleet.devices}
    later = {x.device.name for x in request.later}
    for fault in request.faults.faults:
        for name in (fault.device, fault.other):
            if name is not None and name not in later and not (fault.type == "cut" and name in hosts):
                request.fleet.device(name)
        if fault.type == "slow" and not request.rehearse:
            raise UsageError(
                f"the fault '{fault}' needs paced devices: a real one cannot be told to be slow",
                remedy="--rehearse with a fleet file",
            )
    if request.noise is not None and not request.rehearse:
        raise UsageError("noise disturbs paced devices only", remedy="--rehearse with a fleet file")
    if request.noise is not None and not 0 <= request.noise < float("inf"):
        raise UsageError(f"noise must be 0 or more, got {request.noise:g}", remedy="0.5, say")


def at_start(request: Request) -> Request:
    """The same request with the devices that its faults let join later set apart."""
    joins = {f.device: int(f.at_step) for f in request.faults.faults if f.type == "join"}
    fleet = request.fleet
    starting = fleet.only(tuple(d.name for d in fleet.devices if d.name not in joins))
    later = tuple(
        Later(
            device=fleet.device(name),
            from_step=step,
            links=tuple(x for x in fleet.links if {x.a, x.b} & {name, fleet.device(name).host}),
        )
        for name, step in joins.items()
    )
    return replace(request, fleet=starting, later=later) if later else request


def runs_folder(root: str | None = None) -> Path:
    """Where runs have their folders: `root`, else EVENER_RUNS, else runs/ here."""
    return Path(root or os.environ.get("EVENER_RUNS", "runs"))


def new_run_dir(name: str, stamp: str, root: str | None = None) -> str:
    """A new folder <name>-<stamp> in the `runs_folder`; a number is added if it is taken."""
    base = runs_folder(root)
    path = base / f"{name}-{stamp}"
    number = 1
    while path.exists():
        number += 1
        path = base / f"{name}-{stamp}-{number}"
    return folder_at(path)


@contextmanager
def unless_unused(folder: str) -> Iterator[None]:
    """Where what is done in here fails and leaves nothing to read in the run's `folder`, that goes too."""
    try:
        yield
    except BaseException:
        with suppress(OSError):
            if {p.name for p in Path(folder).iterdir()} <= UNREAD:
                shutil.rmtree(folder)
        raise


def folder_at(path: str | Path) -> str:
    """The folder at `path`, made if it is not there; FileError if it cannot be."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise FileError(
            f"cannot make the run's folder {path}: {e.strerror}",
            remedy="--run-dir with a folder that you may make or write to; EVENER_RUNS is where others go",
        ) from e
    return str(path)


def check_out(path: Path) -> None:
    """UsageError or FileError unless outputs can be written to `path`."""
    if path.suffix not in (".safetensors", ".npz"):
        raise UsageError(f"cannot tell the kind of {path}", remedy="a name that ends in .safetensors or .npz")
    if not path.parent.is_dir():
        raise FileError(f"no folder {path.parent}", remedy="a folder that is there")
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        what = (
            "is a folder" if path.is_dir() else f"cannot be written: {path.parent} is not yours to write to"
        )
        raise FileError(f"{path} {what}", remedy="another name, or a folder that you may write to")
