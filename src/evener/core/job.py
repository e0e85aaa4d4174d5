"""What the user asks for: the few numbers a plan must respect."""

from typing import Literal

from evener.core.exchange_seconds import PACKINGS
from evener.core.fewer import Fewer
from evener.core.figures import Value

Sums = Literal["auto", "ring", "grouped"]
Shapes = Literal["data-parallel", "auto", "all"]
"""Which plans are searched; "auto": pipelines only where no device holds the model."""
State = Literal["auto", "replicated", "optimizer", "gradients", "parameters"]
"""What devices may keep in unequal parts; "auto": the least that fits, where memory limits a plan."""
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
    `Ownership`: "auto" the least that fits, where memory is short, "replicated" nothing.
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
        if self.global_batch < 1:
            raise ValueError(f"global_batch must be 1 or more, got {self.global_batch}")
        if self.micro_batch is not None and self.micro_batch < 1:
            raise ValueError(f"micro_batch must be 1 or more, got {self.micro_batch}")
        unknown = sorted(set(self.allow) - ALLOWABLE)
        if unknown:
            raise ValueError(f"allow names {', '.join(unknown)}, not {' or '.join(sorted(ALLOWABLE))}")
        strange = sorted(set(self.compress) - set(PACKINGS))
        if strange:
            raise ValueError(f"compress names {', '.join(strange)}, not one of {', '.join(PACKINGS)}")
        for field in ("max_step_s", "max_price_per_hour"):
            limit = getattr(self, field)
            if limit is not None and not 0 < limit < float("inf"):
                raise ValueError(f"{field} must be positive, got {limit}")
        if not 0 <= self.memory_margin < 1:
            raise ValueError(f"memory_margin must be in [0, 1), got {self.memory_margin}")
        given = self.batch_per_device
        if given is not None:
            negative = sorted(n for n, k in given.items() if k < 0)
            if negative:
                raise ValueError(f"batch_per_device is negative for {', '.join(negative)}")
            if sum(given.values()) != self.global_batch:
                raise ValueError(
                    f"batch_per_device sums to {sum(given.values())}, not to the global batch "
                    f"{self.global_batch}"
                )
