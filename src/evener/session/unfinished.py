"""A step of which some samples are kept: what this device still does of it, and what it would keep itself."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil

from evener.core.actions import Action, of_micro_batch
from evener.core.fleet import Fleet
from evener.core.membership import Rest
from evener.core.order import GlobalBatch
from evener.core.plan import Plan
from evener.core.ranges import Ranges
from evener.core.words import in_bytes
from evener.errors import ReductionMismatchError
from evener.runtime.executor import StepResult
from evener.runtime.holding import Alone
from evener.runtime.kept import Kept
from evener.session.feed import Samples
from evener.session.layout import Layout
from evener.session.site import Site, backend_of

LEAST_FREE = 4
"""A device copies its gradients only where so many times their bytes are free on its host."""


@dataclass(frozen=True, kw_only=True)
class Unfinished:
    """This device's part of the rest of a step: what is `kept`, and the micro-batches that it runs `anew`."""

    kept: Kept | None
    anew: Ranges
    stage: int

    @property
    def portions(self) -> Alone:
        return Alone(tuple(stop - first for first, stop in self.anew))

    def row(self) -> tuple[Action, ...]:
        """The actions: one micro-batch after the other, the sums, the step."""
        numbers = range(len(self.anew))
        work = [of_micro_batch(kind, self.stage, number) for number in numbers for kind in ("F", "B")]
        return (*work, Action(type="REDUCE_GRAD", stage=self.stage), Action(type="STEP"))

    def range_of(self, stage: int, micro_batch: int) -> tuple[int, int]:
        """Where in the global batch a micro-batch lies."""
        return self.anew[micro_batch]

    def fetch(self, samples: Samples, batch: GlobalBatch) -> Callable[[int, int], Any]:
        """Reads in this process: no loader has these samples, and the next step's must wait for nothing."""
        return lambda stage, micro_batch: samples.load(batch, self.anew[micro_batch])


def unfinished(rest: Rest | None, kept: Kept | None, here: str, layout: Layout) -> Unfinished | None:
    """The part of device `here`, which has `kept`; None where the step is taken whole."""
    if rest is None:
        return None
    (stage,) = layout.holding.parts
    counts = kept if here in rest.kept else None
    return Unfinished(kept=counts, anew=rest.anew.get(here, ()), stage=stage)


def why_none_kept(layout: Layout, plan: Plan, site: Site, fleet: Fleet) -> str:
    """Why a device keeps none of its samples when another one is lost; "" where it does.

    Each device judges for itself. In data parallelism every device has the whole model's gradients of its own
    samples; elsewhere a sample's gradient is in parts, and the lost device had some.
    """
    if not plan.is_data_parallel:
        return "the plan cuts the model, so a part of each sample's gradient may be lost"
    if any(layout.norms.values()):
        return "in BatchNorm's waves each sample's gradient depends on those of the lost device"
    if site.torch_device.type != "cpu":
        in_place = backend_of(fleet, plan.devices) != "gloo"
        return f"{site.device.name} sums in place on its accelerator" if in_place else ""
    needed = sum(p.nbytes for p in layout.parameters.values() if p.requires_grad)
    free = psutil.virtual_memory().available
    if free < LEAST_FREE * needed:
        return (
            f"{site.device.name} has no room for a copy of its gradients "
            f"({in_bytes(needed)}; {in_bytes(free)} are free on its host)"
        )
    return ""


def check_counted(result: StepResult) -> None:
    """ReductionMismatchError unless every sample of the step was run once."""
    ran = result.totals.samples
    if sum(ran.values()) != result.samples:
        raise ReductionMismatchError(
            "the devices did not run every sample of the step once",
            numbers=", ".join(f"{device} {n}" for device, n in ran.items()) + f" of {result.samples}",
            remedy="no stealing, and tell us",
        )
