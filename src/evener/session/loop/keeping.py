"""Whether this device keeps its part of a step, should another device be lost in it.

noticed before its own sums begin     they are held back, and all that it computed is there: costs nothing
noticed later                         it needs a copy of what went into the sums, where that is worth it;
                                      of what goes to its sum by way of the host none is made
"""

from collections.abc import Callable

import psutil

from evener.core.fleet import Fleet
from evener.core.plan import Plan
from evener.core.words import in_bytes
from evener.policy.rest import worth_copying
from evener.runtime.executor import Executor
from evener.runtime.kept import Kept, RangeOf
from evener.session.layout.lay_out import Layout
from evener.session.site import Site, backend_of

LEAST_FREE = 4
"""A device copies its gradients only where so many times their bytes are free on its host."""
MEASURED = 2
"""The step in which a copy's seconds are measured: the first one also reserves its memory."""


class Keeping:
    """Decides before each step of a generation whether this device's own sums are copied.

    `ended()` says why the others do not wait any more; None while they do.
    """

    def __init__(
        self, layout: Layout, plan: Plan, site: Site, fleet: Fleet, ended: Callable[[], str | None]
    ) -> None:
        self._reducers, self._why_none = layout.holding.reducers, _why_none(layout, plan)
        self._why_no_copy = _why_no_copy(layout, plan, site, fleet)
        self._is_weighed = not self._why_none and not self._why_no_copy
        self._num_steps, self._copy_s = 0, 0.0
        if not self._why_none:
            self._reducers.hold_back(ended)
            self._reducers.outlast(yes=not self._why_no_copy)

    def after_step(self, step_s: float) -> None:
        """A step took `step_s` seconds: is a copy worth it in the next one?"""
        self._num_steps += 1
        if self._num_steps == MEASURED:
            self._copy_s = self._reducers.copied_s
        if self._num_steps >= MEASURED and self._is_weighed:
            is_worth, told = worth_copying(self._copy_s, step_s)
            self._why_no_copy = "" if is_worth else told
            self._reducers.outlast(yes=is_worth)

    def keep(self, executor: Executor, range_of: RangeOf) -> tuple[Kept | None, str]:
        """What this device has of the step in flight, or None and why not; "" where none is."""
        if self._why_none and executor.in_flight:
            return None, self._why_none
        kept, why = executor.keep(range_of)
        return kept, f"{why} ({self._why_no_copy})" if why and self._why_no_copy else why


def _why_none(layout: Layout, plan: Plan) -> str:
    """Why this device has no whole gradients of its own samples alone; "" where it has them."""
    if not plan.is_data_parallel:
        return "the plan cuts the model, so a part of each sample's gradient may be lost"
    if layout.tables.tables:
        return "gradients of a placed table's rows are summed where the rows are, the lost device's too"
    if any(layout.norms.values()):
        return "in BatchNorm's waves each sample's gradient depends on those of the lost device"
    return ""


def _why_no_copy(layout: Layout, plan: Plan, site: Site, fleet: Fleet) -> str:
    """Why own sums cannot outlast the sums over devices, whatever a copy takes; "" where they can."""
    if site.torch_device.type != "cpu":
        in_place = backend_of(fleet, plan.devices) != "gloo"
        return f"{site.device.name} sums in place on its accelerator" if in_place else ""
    needed = sum(p.nbytes for p in layout.parameters.values() if p.requires_grad)
    free = psutil.virtual_memory().available
    if free >= LEAST_FREE * needed:
        return ""
    return f"no room for a copy of its gradients: {in_bytes(needed)}, {in_bytes(free)} are free on its host"
