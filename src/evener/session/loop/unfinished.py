"""A step of which some samples are kept: what this device still does of it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from evener.core.actions import Action, of_micro_batch
from evener.core.membership import Rest
from evener.core.order import GlobalBatch
from evener.core.ranges import Ranges
from evener.errors import ReductionMismatchError
from evener.runtime.executor import StepResult
from evener.runtime.holding import Alone
from evener.runtime.kept import Kept
from evener.session.layout.lay_out import Layout
from evener.session.loop.feed import Samples


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


def check_counted(result: StepResult) -> None:
    """ReductionMismatchError unless every sample of the step was run once."""
    ran = result.totals.samples
    if sum(ran.values()) != result.samples:
        raise ReductionMismatchError(
            "the devices did not run every sample of the step once",
            numbers=", ".join(f"{device} {n}" for device, n in ran.items()) + f" of {result.samples}",
            remedy="no stealing, and tell us",
        )
