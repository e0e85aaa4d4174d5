"""Gradients on their way to the owners, as `Reducers` knows a group of buckets.

    backward ──► p.grad ──► its place in the unit's buffer ──full──► each owner its span
    owner        own span + spans of the others, in the order of devices, by a thread of its own

With the optimiser's state alone in parts, micro-batches add up in whole buffers, which leave in the last
backward; else the buffers leave in every backward, and a device has two of them at most. What an accelerator
waits for the way of a buffer to its host, or of each gradient of a large layer, is OFFLOAD in the trace.
"""

from collections import deque
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from evener.core.buckets import BUCKET_BYTES
from evener.core.seams import Pending
from evener.errors import ModelError, ReductionMismatchError
from evener.runtime.owning.adding import Adding, Contribution
from evener.runtime.owning.means import Means
from evener.runtime.owning.spreading import Told
from evener.runtime.owning.units import Unit

_KEYS = 251  # what is agreed on in a step's flags: small enough for any dtype
_MOST = 2  # buffers under way, where they leave in every backward
TAG = 0x10000


class OwnedGradients:
    """Collects this device's gradients of `units`, sends each owner its part, and holds the sums of its own.

    `pieces` has, by unit, this device's pieces as the optimiser moves them, with where they begin in the own
    span; after `finish` their `.grad` is the sum over devices and micro-batches. `rounds` of a step come by
    `begin_step`.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        pieces: Mapping[int, Mapping[str, tuple[nn.Parameter, int]]],
        means: Means,
        told: Told,
        *,
        in_rounds: bool,
    ) -> None:
        ranks = self.ranks = means.ranks
        self._post, self._wire, self._device, self._told = means.post, means.wire, means.device, told
        units = [u for u in units if any(p.requires_grad for p in u.named.values())]
        self._units, self._pieces, self._in_rounds, self._now = units, pieces, in_rounds, means.now
        self._places = {
            p: (unit, i, place)
            for unit in units
            for i, (_, p, place) in enumerate(unit.places())
            if p.requires_grad
        }
        if not self._places:
            raise ModelError("no parameter of the model requires a gradient", remedy="unfreeze some")
        self._order = {p: i for i, p in enumerate(self._places)}
        self._trained = {u.number: sum(p.requires_grad for p in u.named.values()) for u in units}
        self._mine = [u for u in units if u.spans[ranks.here][1] > u.spans[ranks.here][0]]
        self._adding = Adding(self._mine, ranks, means.post, TAG)
        self._hooks = [p.register_post_accumulate_grad_hook(self._collect) for p in self._places]
        self._kept: dict[int, Tensor] = {}  # whole buffers of all micro-batches, on the device
        self._open: dict[int, Tensor] = {}  # buffers being filled, by unit
        self._filled: dict[int, set[int]] = {}
        self._missing: dict[int, int] = {}
        self._under_way: deque[_Leaving] = deque()
        self._flags = torch.zeros(0)
        self._flagged: Pending | None = None
        self._collects = self._armed = False
        self._step = self._round = -1
        self._rounds = dict.fromkeys(ranks.devices, 1)

    @property
    def num_bytes(self) -> int:
        """Bytes that one device sends and keeps of a step's gradients, once through."""
        return sum(u.num_bytes for u in self._units)

    def begin_step(self, step: int, rounds: Mapping[str, int]) -> None:
        """`rounds` is how many backwards each device will have in this step; the same on every device."""
        self._step, self._round = step, -1
        self._rounds = dict(rounds) if self._in_rounds else {d: min(1, n) for d, n in rounds.items()}
        self._flags = torch.zeros(len(self._order))
        self._adding.begin(self._rounds)

    def begin(self, scale: float) -> None:
        """A backward is about to run, whose gradients count as they are (`scale` is 1)."""
        assert scale == 1.0, "weights travel in the seed of the backward"
        self._collects = True
        if self._in_rounds:
            self._close_round()
            self._begin_round()

    def take(self, p: Tensor, grad: Tensor) -> None:
        """`grad` is what a backward gave for `p`, were it by a way that runs no hooks."""
        if isinstance(p, nn.Parameter) and p in self._places:
            p.grad = grad
            self._collect(p)

    def arm(self, step: int, segment: int = 0) -> None:
        """The next backward is the last of the step."""
        if not self._in_rounds:
            self._begin_round()

    def release(self, step: int, segment: int = 0) -> None:
        """No backward comes any more: what was not run counts as zero."""
        if not self._armed and self._round + 1 < self._rounds[self.ranks.here]:
            self._begin_round()
        self._close_round()
        while self._round + 1 < self._rounds[self.ranks.here]:
            self._begin_round()
            self._close_round()

    def launch_rest(self, step: int) -> None:
        """Send all that is still here, and tell the others which parameters had a gradient."""
        if self._flagged is None:
            self.release(step)
            keys = torch.zeros(self.ranks.world_size)
            keys[self.ranks.rank] = 1 + step % _KEYS
            self._flags = torch.cat([self._flags, keys])
            self._flagged = self._wire.all_reduce(self._flags, f"step {step}, flags of gradients")

    def wait(self) -> None:
        """Return when this device has the sums of all that it owns, and all it sent has left."""
        flagged, self._flagged = self._flagged, None
        sizes = {u.number: u.sizes for u in self._mine}
        for (_, unit), came_s in self._adding.wait().items():  # each round's took the links' time
            self._post.reach(came_s, sizes[unit], adds=True)
        while self._under_way:
            self._under_way.popleft().wait()
        if flagged is not None:
            flagged.wait()

    def finish(self, divide_by: float = 1.0) -> None:
        """Check that all devices were in the same step, divide, and give each piece its `.grad`."""
        had = self._flags[: len(self._order)].tolist()
        self._check_keys([int(k) for k in self._flags[len(self._order) :].tolist()])
        for unit in self._mine:
            whole = self._adding.sums[unit.number]
            if divide_by != 1.0:
                whole.mul_(1.0 / divide_by)
            whole = self._at_home(unit, whole)
            for name, (piece, start) in self._pieces[unit.number].items():
                p = unit.named[name]
                if piece.requires_grad and had[self._order[p]]:
                    piece.grad = whole[start : start + piece.numel()].view(piece.shape)
        self._forget()

    def norm(self) -> Tensor:
        """The 2-norm of the summed gradients that this device owns."""
        grads = [piece.grad for held in self._pieces.values() for piece, _ in held.values()]
        norms = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in grads if g is not None]
        return torch.stack(norms).norm() if norms else torch.zeros((), dtype=torch.float64)

    def multiply(self, factor: float | Tensor) -> None:
        """Scale the summed gradients that this device owns."""
        for held in self._pieces.values():
            for piece, _ in held.values():
                if piece.grad is not None:
                    piece.grad.mul_(factor)

    def discard(self) -> None:
        """Drop what was collected since the last step."""
        for p in self._places:
            p.grad = None
        for held in self._pieces.values():
            for piece, _ in held.values():
                piece.grad = None
        self._forget()

    def close(self) -> None:
        """Remove the hooks from the parameters and let the thread end."""
        for hook in self._hooks:
            hook.remove()
        self._under_way.clear()
        self._adding.close()

    def is_done(self, unit: Unit) -> bool:
        """Whether all gradients of `unit` came in the backward that runs."""
        return not self._missing.get(unit.number, 0)

    def _begin_round(self) -> None:
        self._round += 1
        self._armed = True
        self._missing = {n: count for n, count in self._trained.items() if count}

    def _collect(self, p: nn.Parameter) -> None:
        grad = p.grad
        if grad is None or not self._collects:
            return
        unit, i, (start, end) = self._places[p]
        if grad.is_sparse:
            raise ModelError(
                f"a parameter of shape {tuple(p.shape)} has a sparse gradient, which owners do not add",
                remedy="sparse=False, or replicated state (--state replicated)",
            )
        if self._armed and unit.number not in self._missing:
            raise ModelError(
                "a gradient arrived after its part had been sent",
                remedy="call backward once per batch: add the losses first, then loss.backward()",
            )
        place = self._buffer(unit)[start:end]
        filled = self._filled[unit.number]
        if i in filled:
            place.add_(grad.reshape(-1))
        elif place.device.type == "cpu" and grad.device.type != "cpu":
            self._on_host(unit, grad.reshape(-1), place)
        else:
            place.copy_(grad.reshape(-1))
        filled.add(i)
        self._flags[self._order[p]] = 1.0
        p.grad = None
        if self._armed:
            self._missing[unit.number] -= 1
            if not self._missing[unit.number]:
                self._launch(unit)

    def _buffer(self, unit: Unit) -> Tensor:
        """Where gradients of `unit` are collected: where the device has them, to go to its host as one.

        In rounds a unit of one large layer is collected on the host: its memory is what is to be spared.
        """
        found = self._open.get(unit.number)
        if found is not None:
            return found
        self._filled.setdefault(unit.number, set())
        if self._in_rounds:
            self._make_room()
            on = self._device if unit.num_bytes <= BUCKET_BYTES else None
            found = torch.empty(unit.count, dtype=unit.dtype, device=on)
        else:
            found = self._kept.get(unit.number)
            if found is None:
                found = self._kept[unit.number] = torch.empty(
                    unit.count, dtype=unit.dtype, device=self._device
                )
        self._open[unit.number] = found
        return found

    def _make_room(self) -> None:
        """Wait for the oldest buffer where two are under way, unless owners first add one that is to come."""
        while len(self._under_way) >= _MOST:
            oldest = self._under_way[0]
            if oldest.round == self._round and any(n > oldest.unit for n in self._missing):
                return
            self._under_way.popleft().wait()

    def _close_round(self) -> None:
        """What had no gradient in this backward counts as zero."""
        if not self._armed:
            return
        for unit in reversed(self._units):
            if unit.number in self._missing:
                self._launch(unit)
        self._armed = False

    def _launch(self, unit: Unit) -> None:
        buffer, filled = self._buffer(unit), self._filled.pop(unit.number)
        self._missing.pop(unit.number, None)
        del self._open[unit.number]
        for i, (_, _, (start, end)) in enumerate(unit.places()):
            if i not in filled:
                buffer[start:end].zero_()
        here = self.ranks.here
        first, last = unit.spans[here]
        leaving = _Leaving(unit.number, self._round)
        values = buffer if buffer.device.type == "cpu" else self._on_host(unit, buffer)
        handed_in_s = self._post.now()
        if first < last:
            leaving.own = self._adding.put(unit.number, values[first:last], handed_in_s)
        for owner in unit.owners():
            if owner != here:
                a, b = unit.spans[owner]
                leaving.sends.append(self._post.send(values[a:b], owner, TAG + unit.number))
        self._under_way.append(leaving)

    def _on_host(self, unit: Unit, found: Tensor, place: Tensor | None = None) -> Tensor:
        """`found` of an accelerator on its host, in `place` if that is given.

        The copy would wait for what is queued there in any case.
        """
        torch.accelerator.current_stream(self._device).synchronize()
        since = self._now()
        values = found.to("cpu") if place is None else place.copy_(found)
        self._told(f"OFFLOAD{unit.number}", since)
        return values

    def _at_home(self, unit: Unit, whole: Tensor) -> Tensor:
        """The sums where the device has them, over what it kept of its own where that is there."""
        if self._device.type == "cpu":
            return whole
        kept = self._kept.get(unit.number)
        if kept is None:
            return whole.to(self._device)
        first, last = unit.spans[self.ranks.here]
        return kept[first:last].copy_(whole)

    def _check_keys(self, keys: list[int]) -> None:
        mine = keys[self.ranks.rank]
        for device, key in zip(self.ranks.devices, keys, strict=True):
            if key != mine:
                raise ReductionMismatchError(
                    f"{self.ranks.here} added up step {self._step} while {device} was in another one",
                    numbers=f"key {mine} on {self.ranks.here}, {key} on {device}",
                    remedy="every device must run the same steps: no early break and no extra step on one",
                )

    def _forget(self) -> None:
        self._collects = self._armed = False
        self._missing = {}
        self._open.clear()
        self._filled.clear()


class _Leaving:
    """A buffer that was sent: free when every owner has its part."""

    def __init__(self, unit: int, number: int) -> None:
        self.unit, self.round = unit, number
        self.own: Contribution | None = None
        self.sends: list[Pending] = []

    def wait(self) -> None:
        sends, self.sends = self.sends, []
        while sends:
            sends.pop().wait()
        if self.own is not None:
            self.own.wait()
