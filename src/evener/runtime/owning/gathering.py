"""Parameters in parts: a unit is gathered before it is needed and let go after it, one unit ahead.

    forward    ask 0, 1 │ layer 0 │ let go 0, ask 2 │ layer 1 │ let go 1, ask 3 │ … the last two stay
    backward   layer 3 │ ask 1 │ layer 2 │ let go 3, ask 0 │ layer 1 │ …

Owners hand in everything at a step's beginning, as often as each device will ask for it: who is ahead does
not wait for who is behind. What autograd keeps of a parameter lies in the unit's buffer, which gets memory
again before the backward that reads it.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from evener.core.seams import Pending
from evener.errors import ModelError
from evener.runtime.owning import flats
from evener.runtime.owning.coming import TAG, Coming
from evener.runtime.owning.means import Means
from evener.runtime.owning.spreading import Told
from evener.runtime.owning.units import Unit

STAY = 2  # so many of the last units are not let go between a forward and its backward


class Gathering:
    """Keeps this device's span of every unit in `own`, and gathers whole units while layers run.

    `is_done(unit)` says whether all of a unit's gradients came in the backward under way.
    """

    def __init__(self, model: nn.Module, units: Sequence[Unit], means: Means, told: Told) -> None:
        self._units, self._ranks, self._post = units, means.ranks, means.post
        self._device, self._now, self._told = means.device, means.now, told
        ranks, device = means.ranks, means.device
        self.is_done: Callable[[Unit], bool] = lambda unit: True
        self.own: list[Tensor] = []
        self._flat: list[Tensor] = []
        for unit in units:
            flat = flats.laid_end_to_end(unit, device)
            self.own.append(flat[slice(*unit.spans[ranks.here])].clone())
            flats.hide(unit, device)
            flats.let_go(flat)
            self._flat.append(flat)
        self._source = [own if device.type == "cpu" else own.to("cpu") for own in self.own]
        self._is_here: set[int] = set()
        self._coming: dict[int, Coming] = {}
        self._sends: list[Pending] = []
        self._due: dict[int, int] = {}  # how often each unit will still be asked for in this step
        self._to_run: dict[int, set[str]] = {}
        self._handles = self._hooked(model)

    def begin_step(self, rounds: Mapping[str, int], *, trains: bool) -> None:
        """Hand in what each device will ask for: `rounds` is its number of micro-batches."""
        self._settle()
        here = self._ranks.here
        self._post.now()
        for unit in self._units:
            times = self._times(unit, trains=trains)
            self._due[unit.number] = times * rounds[here]
            if len(self._source[unit.number]):
                for device in self._ranks.devices:
                    for _ in range(times * rounds[device] if device != here else 0):
                        sent = self._post.send(self._source[unit.number], device, TAG + unit.number)
                        self._sends.append(sent)

    def end_step(self) -> None:
        """Nothing is gathered any more, and what was sent has left: owners may move theirs."""
        self._settle()

    def after_move(self) -> None:
        """The optimiser has moved this device's spans."""
        if self._device.type != "cpu" and len(self._ranks.devices) > 1:  # for others alone
            for source, own in zip(self._source, self.own, strict=True):
                source.copy_(own)

    def restored(self) -> None:
        """This device's spans were changed by hand."""
        self.after_move()

    def whole(self) -> None:
        """Have all values on this device's host, for good; called by all devices together."""
        self.begin_step(dict.fromkeys(self._ranks.devices, 1), trains=False)
        cpu = torch.device("cpu")
        for unit in self._units:
            self._ask(unit)
            self._arrive(unit)
            flat = self._flat[unit.number].to("cpu", copy=True)
            flats.hide(unit, self._device)
            self._let_go(unit)
            for _, p, (start, end) in unit.places():
                flats.put(p, flat[start:end].view(p.shape))
        self._settle()
        assert all(p.device == cpu for u in self._units for p in u.named.values())

    def close(self) -> None:
        """Let go of the model."""
        for handle in self._handles:
            handle.remove()
        self._sends.clear()
        self._coming.clear()

    def _times(self, unit: Unit, *, trains: bool) -> int:
        """How often a micro-batch asks for `unit`: once forward, once backward unless it stays."""
        stays = unit.stays or unit.number >= len(self._units) - STAY
        return 2 if trains and not stays else 1

    def _hooked(self, model: nn.Module) -> list:
        modules = dict(model.named_modules())
        handles = [model.register_forward_pre_hook(lambda *_: self._begin_pass())]
        by_layer: dict[str, list[Unit]] = {}
        for unit in self._units:
            for layer in unit.layers:
                by_layer.setdefault(layer, []).append(unit)
        for layer, needed in by_layer.items():
            if all(unit.stays for unit in needed):
                continue  # there from the pass's beginning
            module = modules.get(layer, model)
            handles.append(module.register_forward_pre_hook(self._before(needed)))
            handles.append(module.register_forward_hook(self._after(layer, needed)))
        handles.append(model.register_forward_hook(lambda *_: self._end_forward()))
        return handles

    def _begin_pass(self) -> None:
        self._free_all()
        self._to_run = {u.number: set(u.layers) for u in self._units}
        for unit in self._units:
            if unit.stays:
                self._ask(unit)
        for unit in self._units:
            if unit.stays:
                self._arrive(unit)
        self._ask_next(self._units)

    def _end_forward(self) -> None:
        if not torch.is_grad_enabled():
            self._free_all()

    def _before(self, needed: list[Unit]) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: object) -> None:
            for unit in needed:
                self._ask(unit)
            self._ask_next(self._units[needed[-1].number + 1 :])
            for unit in needed:
                self._arrive(unit)

        return hook

    def _after(self, layer: str, needed: list[Unit]) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: object, output: object) -> None:
            if not torch.is_grad_enabled():
                for unit in needed:
                    self._ran(unit, layer)
                return
            for t in tree_leaves(output):
                if isinstance(t, Tensor) and t.requires_grad:
                    t.register_hook(lambda gradient: self._before_backward(needed))
            for unit in needed:
                if unit.number < len(self._units) - STAY:
                    self._ran(unit, layer)

        return hook

    def _ran(self, unit: Unit, layer: str) -> None:
        left = self._to_run[unit.number]
        left.discard(layer)
        if not left and not unit.stays:
            self._let_go(unit)

    def _before_backward(self, needed: list[Unit]) -> None:
        lowest = needed[0].number
        for number in [n for n in self._is_here if n > needed[-1].number]:
            unit = self._units[number]
            if not unit.stays and self.is_done(unit):
                self._let_go(unit)
        for unit in reversed(needed):
            self._ask(unit)
        self._ask_next(self._units[:lowest][::-1])
        for unit in needed:
            self._arrive(unit)

    def _ask_next(self, units: Sequence[Unit]) -> None:
        """Begin to gather the first of `units` that does not stay anyway."""
        unit = next((u for u in units if not u.stays), None)
        if unit is not None and self._due[unit.number] > 0:
            self._ask(unit)

    def _ask(self, unit: Unit) -> None:
        """Begin to gather `unit`, unless it is here or on its way."""
        number, here = unit.number, self._ranks.here
        if number in self._is_here or number in self._coming:
            return
        if not self._due.get(number):
            raise ModelError(
                f"the parameters of {', '.join(unit.layers)} are needed more often than once in a forward "
                "and once in its backward",
                remedy='a model that runs each layer once, or state held in parts up to "gradients"',
            )
        self._due[number] -= 1
        flat = self._flat[number]
        flats.take_back(flat)
        with torch.no_grad():
            flat[slice(*unit.spans[here])].copy_(self.own[number])
        self._coming[number] = Coming(unit, flat, here, self._post)

    def _arrive(self, unit: Unit) -> None:
        coming = self._coming.pop(unit.number, None)
        if coming is None:
            return
        since = self._now()
        coming.take()
        flats.views(unit, self._flat[unit.number])
        self._is_here.add(unit.number)
        self._told(f"UNSHARD{unit.number}", since)

    def _let_go(self, unit: Unit) -> None:
        if unit.number in self._is_here:
            self._is_here.discard(unit.number)
            flats.hide(unit, self._device)
            flats.let_go(self._flat[unit.number])

    def _free_all(self) -> None:
        """Whatever is here or on its way goes: the next pass asks anew."""
        for number in list(self._coming):
            self._arrive(self._units[number])
        for number in list(self._is_here):
            self._let_go(self._units[number])

    def _settle(self) -> None:
        """Take what was announced and not needed (a micro-batch that did not count); see all sends off."""
        self._free_all()
        for unit in self._units:
            while self._due.get(unit.number):
                self._ask(unit)
                self._arrive(unit)
                self._let_go(unit)
        sends, self._sends = self._sends, []
        while sends:
            sends.pop().wait()
