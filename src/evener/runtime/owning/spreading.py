"""Whole parameters on every device, of which each owner moves its own and tells the others.

step n        optimizer ─► owner hands in its spans ─► others ask for them, into place
step n + 1    before each layer's forward: are its values here?          behind data and earlier layers
"""

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from evener.core.seams import Pending
from evener.runtime.owning import flats
from evener.runtime.owning.coming import TAG, Coming
from evener.runtime.owning.held import HeldStages
from evener.runtime.owning.means import Means
from evener.runtime.owning.units import Unit

Told = Callable[[str, float], None]


class Spreading:
    """Keeps whole copies of the parameters alike; `own` has, by unit, this device's span of each.

    `told(action, since)` is called after each wait that showed, `means.now()` gives the device's clock.
    """

    def __init__(self, held: HeldStages, units: Sequence[Unit], means: Means, told: Told) -> None:
        self._units, self._ranks, self._post = units, means.ranks, means.post
        self._device, self._now, self._told = means.device, means.now, told
        ranks, device = means.ranks, means.device
        self._flat: list[Tensor] = []
        for unit in units:
            flat = flats.laid_end_to_end(unit, device)
            flats.views(unit, flat)
            self._flat.append(flat)
        self.own = [f[slice(*u.spans[ranks.here])] for u, f in zip(units, self._flat, strict=True)]
        self._sends: list[Pending] = []
        self._coming: dict[int, Coming] = {}
        by_module: dict[nn.Module, list[Unit]] = {}
        for unit in units:
            for module in held.runners(unit):
                by_module.setdefault(module, []).append(unit)
        self._handles = [
            module.register_forward_pre_hook(self._before(needed)) for module, needed in by_module.items()
        ]

    def end_step(self) -> None:
        """All values are here, and what was sent has left: owners may move theirs."""
        for unit in self._units:
            self._arrive(unit)
        sends, self._sends = self._sends, []
        while sends:
            sends.pop().wait()

    def after_move(self) -> None:
        """The optimiser has moved this device's spans: the others shall have them."""
        here, cpu = self._ranks.here, self._device.type == "cpu"
        for unit, flat in zip(self._units, self._flat, strict=True):
            first, last = unit.spans[here]
            self._post.now()
            others = [d for d in unit.spans if d != here]
            if first < last and others:
                own = flat[first:last] if cpu else flat[first:last].to("cpu")
                self._sends += [self._post.send(own, d, TAG + unit.number) for d in others]
            self._coming[unit.number] = Coming(unit, flat, here, self._post)

    def restored(self) -> None:
        """The parameters were changed by hand, alike on every device."""

    def whole(self) -> None:
        """Have all values on this device; called by all devices together."""
        self.end_step()

    def close(self) -> None:
        """Let go of the model."""
        for handle in self._handles:
            handle.remove()
        self._sends.clear()
        self._coming.clear()

    def _before(self, needed: list[Unit]) -> Callable[..., None]:
        # By its clock every forward asks alike: a rehearsal counts an action once for all of its kind.
        def hook(module: nn.Module, inputs: object) -> None:
            for unit in needed:
                self._arrive(unit)

        return hook

    def _arrive(self, unit: Unit) -> None:
        coming = self._coming.pop(unit.number, None)
        if coming is None:
            self._post.reach((), {}, adds=False)
            return
        since = self._now()
        coming.take()
        self._told(f"UNSHARD{unit.number}", since)
