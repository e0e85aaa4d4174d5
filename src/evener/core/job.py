"""What the user asks for: the few numbers a plan must respect."""

from collections.abc import Sequence
from typing import Literal

from evener.core.exchange_seconds import PACKINGS
from evener.core.fewer import Fewer
from evener.core.figures import Value
from evener.errors import UsageError

Sums = Literal["auto", "ring", "grouped"]
Shapes = Literal["data-parallel", "auto", "all"]
"""Which plans are searched; "auto": pipelines only where no device holds the model."""
State = Literal["auto", "replicated", "optimizer", "gradients", "parameters"]
"""What devices may keep in unequal parts; "auto": the fastest that fits, where memory limits a plan."""
MAX_SAMPLES = 2**22
"""Of a global batch. Every split of it is looked at: 4 million samples take a planner 40 s (measured)."""
MOST_MARGIN = 0.99
MARGIN = "the part of each memory that stays free; 0.1 leaves a tenth"
ALLOWABLE = {"tensor-parallel", "unlinked"}


class Job(Value, frozen=True, kw_only=True):
    """Global batch, limits and wishes of a training job.

    `batch_per_device` fixes the samples each device takes from every global batch; names left out take
    none. `place` pins layers: pattern → device, kind or "cpu". `memory_margin` is the part of a
    device's memory that a plan leaves free (0.1 leaves a tenth). `allow` names what a plan may do beyond the
    usual: "tensor-parallel" groups of equal devices, "unlinked" devices whose data costs nothing.
    `sums` is how gradients are summed: "auto" what is predicted fastest, one "ring", or "grouped" by host.
    `compress` names what may be used between hosts where that is predicted faster ("int8"); see
    `core/exchange_seconds.py`. `fewer` are the ways in which hosts may exchange less often than once a step,
    where the model predicts a gain; see `core/fewer.py`. `state` is what may be kept in parts, see
    `Ownership`: "auto" the fastest that fits, where memory is short, "replicated" nothing.
    """

    global_batch: int
    micro_batch: int | None = None
    batch_per_device: dict[str, int] | None = None
    memory_margin: float = 0.1
    objective: Literal["time", "money"] = "time"
    max_step_s: float | None = None
    max_price_per_hour: float | None = None
    place: dict[str, str] = {}
    allow: tuple[str, ...] = ()
    keep_all: bool = False
    sums: Sums = "auto"
    compress: tuple[str, ...] = ()
    state: State = "replicated"
    fewer: tuple[Fewer, ...] = ()

    def __post_init__(self) -> None:
        batch, at_once, given = self.global_batch, self.micro_batch, self.batch_per_device
        check_range("--batch", batch, 1, MAX_SAMPLES, "samples of a step")
        if at_once is not None:
            check_range("--micro-batch", at_once, 1, batch, "samples at once, of a step's --batch")
        check_range("--memory-margin", self.memory_margin, 0, MOST_MARGIN, MARGIN)
        for option, limit in (("--max-step", self.max_step_s), ("--max-price", self.max_price_per_hour)):
            if limit is not None and not 0 < limit < float("inf"):
                raise UsageError(f"{option} is {limit}", remedy="a number above 0, or leave it out")
        unknown = sorted(set(self.allow) - ALLOWABLE)
        if unknown:
            raise UsageError(
                f"--allow names {', '.join(unknown)}, which is nothing that can be allowed",
                remedy=" or ".join(sorted(ALLOWABLE)),
            )
        check_together(self.state, self.sums, self.compress, self.fewer)
        for name, samples in (given or {}).items():
            check_range(f"--batch-per-device of {name}", samples, 0, MAX_SAMPLES, "samples of each step")
        if given is not None and sum(given.values()) != batch:
            raise UsageError(
                f"--batch-per-device sums to {sum(given.values())}, not to the global batch of {batch}",
                remedy="leave --batch out: the global batch is then their sum",
            )


def check_range(option: str, value: float, least: float, most: float, what: str) -> None:
    """UsageError unless `value` is from `least` to `most`; not a number is in no range.

    Example: ("--memory-margin", 2, 0, 0.99, "…") is refused, with "0 to 0.99" as what would work.
    """
    if not least <= value <= most:
        raise UsageError(f"{option} is {value}", remedy=f"{least} to {most}: {what}")


def check_together(state: State, sums: Sums, compress: Sequence[str], fewer: Sequence[Fewer]) -> None:
    """UsageError for ways to exchange gradients that do not exist, are named twice or exclude each other.

    Example: state "optimizer" and compress ("int8",): owners get whole gradients, so nothing is compressed.
    """
    ways = ", ".join(PACKINGS)
    strange = sorted(set(compress) - set(PACKINGS))
    if strange:
        raise UsageError(f"--compress names {', '.join(strange)}, which is no way to compress", remedy=ways)
    twice = sorted({name for name in compress if list(compress).count(name) > 1})
    if twice:
        raise UsageError(f"--compress names {', '.join(twice)} twice", remedy=f"each once, of {ways}")
    held = f"--state {state}" if state != "replicated" else ""
    ring = "--sums ring" if sums == "ring" else ""
    packed = f"--compress {','.join(compress)}" if compress else ""
    seldom = f"--fewer {','.join(map(str, fewer))}" if fewer else ""
    apart = seldom if any(f.parts_hosts for f in fewer) else ""
    for first, second, why in (
        (held, seldom, "owners of state need the gradients of every step"),
        (held, packed, "gradients go to the owners of state as they are, not over groups of a host"),
        (ring, apart, "hosts that take steps by themselves are groups, and one ring has none"),
        (ring, packed, "compressed is what groups of a host exchange, and one ring has none"),
    ):
        if first and second:
            raise UsageError(f"{first} and {second} exclude each other: {why}", remedy="one of them")
