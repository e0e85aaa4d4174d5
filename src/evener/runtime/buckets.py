"""Gradients on their way into the sum: flat buckets, filled during backward, launched in plan order.

        backward ──► p.grad ──(× scale)──► view of bucket ──► all-reduce once the bucket is full
        p4 p3 | p2 p1 | p0                 bucket 0 | 1 | 2     and bucket k-1 is on its way

A bucket is one flat tensor: the gradients, then a tail that tells the devices apart:

        [ grad p4 | grad p3 | key of device 0 … key of device n-1 | p4 had a gradient | p3 had a gradient ]

After the sum the key slots show which reduction each device was in, and the last part on how many
devices a parameter had a gradient at all: on none means its `.grad` must stay None, as on one device.

Sums are made in place. Where this device's own sum is to outlast them (`outlast`), a bucket in host memory is
copied as it leaves; one on an accelerator, which goes by way of the host, is itself the copy until the sum
comes back. No bucket leaves once it is known that the others do not wait for it (`hold_back`).
"""

import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from evener.core.buckets import BUCKET_BYTES, fill_buckets
from evener.core.seams import Pending, Wire
from evener.errors import ModelError, PeerLostError, ReductionMismatchError
from evener.runtime.ranks import Ranks
from evener.runtime.residing.homes import Homes

# Keys travel in the gradients' dtype and must survive bfloat16, which holds whole numbers up to 256.
_KEYS = 251


class GradientBuckets:
    """Collects the gradients of every micro-batch of a step and sums them once over the group's devices.

    `segments` are lists of parameters that can leave at different times, in the one order in which every
    device of the group launches them. Use: `begin(scale)` before each backward, `arm(step, segment)` before
    the last one of a segment, then `launch_rest`, `wait`, `finish`. Then each `.grad` is the sum over devices
    and micro-batches of scale × gradient. `homes` says what stands for parameters that live elsewhere.
    """

    def __init__(
        self,
        segments: Sequence[list[nn.Parameter]],
        ranks: Ranks,
        wire: Wire,
        limit: int = BUCKET_BYTES,
        homes: Homes | None = None,
    ) -> None:
        self.ranks, self._wire, self._homes = ranks, wire, homes or Homes()
        self._segments = [_lay_out(parameters, ranks, limit, self._homes) for parameters in segments]
        self._buckets = [bucket for segment in self._segments for bucket in segment]
        if not self._buckets:
            raise ModelError(
                "no parameter of the model requires a gradient", remedy="unfreeze what is to be trained"
            )
        self._place = {
            leaf: (b, i)
            for b in self._buckets
            for i, p in enumerate(b.parameters)
            for leaf in self._homes.leaves_of(p)
        }
        self._hooks = [leaf.register_post_accumulate_grad_hook(self._collect) for leaf in self._place]
        for leaf in self._place:
            self._homes.route(leaf, self._accept)
        self._scale = 1.0
        self._collects = False
        self._step = -1
        self._next = 0
        self._ended: Callable[[], str | None] = lambda: None
        self._held_back: str | None = None
        self.copied_s = 0.0  # seconds that copies of own sums took in the last step

    @property
    def num_bytes(self) -> int:
        """Bytes that one device sends into the sum of a step."""
        return sum(b.flat.numel() * b.flat.element_size() for b in self._buckets)

    def hold_back(self, ended: Callable[[], str | None]) -> None:
        """Begin no sums in a step before whose first one `ended()` says that the others have gone."""
        self._ended = ended

    def outlast(self, *, yes: bool) -> None:
        """Whether this device's own sums outlast the sums over devices, for `own_sums`.

        On an accelerator not where these are made in place.
        """
        for bucket in self._buckets:
            bucket.outlasts = yes

    def own_sums(self) -> dict[nn.Parameter, torch.Tensor] | None:
        """This device's own sums of the step under way; None where one of them is in a sum with others'."""
        found: dict[nn.Parameter, torch.Tensor] = {}
        for bucket in self._buckets:
            flat = bucket.own_values()
            if flat is None:
                return None
            rows = zip(bucket.parameters, bucket.views_of(flat), bucket.filled, strict=True)
            found |= {p: view for p, view, filled in rows if filled}
        return found

    def put(self, sums: Mapping[nn.Parameter, torch.Tensor]) -> None:
        """Begin the step under way with `sums`, as `own_sums` gave them."""
        for bucket in self._buckets:
            for i, p in enumerate(bucket.parameters):
                if p in sums:
                    bucket.views[i].copy_(sums[p])
                    bucket.filled[i] = True

    def begin(self, scale: float) -> None:
        """The next backward's gradients count `scale` times. Until then backwards are not ours."""
        self._scale, self._collects = scale, True

    def take(self, p: torch.Tensor, grad: torch.Tensor) -> None:
        """`grad` is what a backward gave for `p`, were it by a way that runs no hooks."""
        if isinstance(p, nn.Parameter) and p in self._place:
            self._receive(p, grad)

    def arm(self, step: int, segment: int = 0) -> None:
        """The next backward is the segment's last: its buckets leave as they fill, while it still runs."""
        self._step = step
        for bucket in self._segments[segment]:
            bucket.missing = len(bucket.parameters)

    def release(self, step: int, segment: int) -> None:
        """Nothing more comes for this segment: what it lacks counts as zero, and it leaves in its turn."""
        self._step = step
        for bucket in self._segments[segment]:
            bucket.missing = 0
        self._launch_full()

    def launch_rest(self, step: int) -> None:
        """Send every bucket that is still here; parameters without a gradient count as zero."""
        for segment in range(len(self._segments)):
            self.release(step, segment)

    def wait(self) -> None:
        """Return when every bucket holds the sum over all devices."""
        for bucket in self._buckets:
            bucket.wait()

    def finish(self, divide_by: float = 1.0) -> None:
        """Check that all devices were in the same sums, divide, hand out each parameter's `.grad`."""
        for number, bucket in enumerate(self._buckets):
            keys, holders = bucket.tail_values()
            self._check_keys(number, keys)
            if divide_by != 1.0:
                bucket.flat.mul_(1.0 / divide_by)
            bucket.found = [bool(count) for count in holders]
            if not bucket.is_away:
                bucket.hand_out(bucket.views)
        self._forget()

    def hand_over(self) -> None:
        """Gradients that were summed elsewhere go to where their parameters live, for the optimiser."""
        away = [b for b in self._buckets if b.is_away]
        home = [b.flat[: b.num_grads].to(b.parameters[0].device, non_blocking=True) for b in away]
        if away:
            torch.accelerator.synchronize(away[0].flat.device)
        for bucket, flat in zip(away, home, strict=True):
            bucket.hand_out(bucket.views_of(flat))

    def discard(self) -> None:
        """Drop what was collected since the last step."""
        for bucket in self._buckets:
            for p in bucket.parameters:
                p.grad = None
        self._forget()

    def close(self) -> None:
        """Remove the hooks from the parameters and drop every reduction on its way."""
        for hook in self._hooks:
            hook.remove()
        for bucket in self._buckets:
            bucket.pending = None

    def sum_of(self, p: nn.Parameter) -> torch.Tensor | None:
        """Where the summed gradient of `p` lies, zeros if no device had one; None if `p` is not in here."""
        bucket, i = self._place.get(p, (None, 0))
        return bucket.views[i] if bucket else None

    def norm(self) -> torch.Tensor:
        """The 2-norm of all summed gradients together, each parameter counted once."""
        norms = [b.flat[: b.num_grads].norm() for b in self._buckets]
        if len({n.device for n in norms}) > 1:  # a stage's on its device, another's on the host
            norms = [n.cpu() for n in norms]
        return torch.stack(norms).norm()

    def multiply(self, factor: float | torch.Tensor) -> None:
        """Scale all summed gradients in place."""
        for bucket in self._buckets:
            bucket.flat[: bucket.num_grads].mul_(factor)

    def _collect(self, p: nn.Parameter) -> None:
        grad = p.grad
        if grad is None or not self._collects:
            return
        p.grad = None
        self._receive(p, grad)

    def _receive(self, p: nn.Parameter, grad: torch.Tensor) -> None:
        if grad.is_sparse:
            raise ModelError(
                f"a parameter of shape {tuple(p.shape)} has a sparse gradient, which data parallelism "
                "does not sum yet",
                remedy='place={"NAME": "cpu"} in the recipe takes it out of these sums; or sparse=False',
            )
        if not self._homes.takes(p, grad):
            self._accept(p, grad)

    def _accept(self, p: torch.Tensor, grad: torch.Tensor) -> None:
        """`grad` counts; it lies where it is summed."""
        assert isinstance(p, nn.Parameter)
        bucket, i = self._place[p]
        if bucket.pending is not None:
            raise ModelError(
                "a gradient arrived after its sum had been started",
                remedy="call backward once per batch: add the losses first, then loss.backward()",
            )
        if self._scale == 0:
            pass  # a stand-in batch: whatever it gave, NaN included, does not count
        elif bucket.filled[i]:
            bucket.views[i].add_(grad, alpha=self._scale)
        else:
            torch.mul(grad, self._scale, out=bucket.views[i])
            bucket.filled[i] = True
        if bucket.missing is not None:
            bucket.missing -= 1
            self._launch_full()

    def _launch_full(self) -> None:
        """Launch full buckets in plan order: in the order of readiness two devices could pair wrong ones."""
        while self._next < len(self._buckets) and self._buckets[self._next].missing == 0:
            self._launch(self._buckets[self._next])
            self._next += 1

    def _launch(self, bucket: "_Bucket") -> None:
        number = self._next
        if number == 0:
            self.copied_s, self._held_back = 0.0, self._ended()
        if self._held_back:
            bucket.pending = _NeverBegan(f"step {self._step} was not summed: {self._held_back}")
            return
        key = 1 + (self._step * len(self._buckets) + number) % _KEYS
        bucket.seal(self.ranks.rank, key)
        self.copied_s += bucket.leave()
        try:
            bucket.pending = self._wire.all_reduce(
                bucket.flat,
                f"step {self._step}, bucket {number}",
                exact_tail=bucket.flat.numel() - bucket.num_grads,
            )
        except PeerLostError as e:
            # The rest of this backward still counts: who waits for the sum is told. The error itself would
            # hold the frames that hold the group's sockets.
            bucket.pending = _NeverBegan(e.what, e.numbers, e.remedy)

    def _check_keys(self, number: int, keys: list[int]) -> None:
        mine = keys[self.ranks.rank]
        for device, key in zip(self.ranks.devices, keys, strict=True):
            if key != mine:
                raise ReductionMismatchError(
                    f"{self.ranks.here} summed step {self._step}, bucket {number}, while {device} was in "
                    "another reduction",
                    numbers=f"key {mine} on {self.ranks.here}, {key} on {device}",
                    remedy="every device must run the same steps: no early break and no extra step on one",
                )

    def _forget(self) -> None:
        self._next, self._collects = 0, False
        for bucket in self._buckets:
            bucket.missing = None
            bucket.filled = [False] * len(bucket.parameters)
            bucket.has_left = bucket.has_come = False


class _NeverBegan:
    """A sum that could not be begun."""

    def __init__(self, what: str, numbers: str = "", remedy: str = "") -> None:
        self._words = (what, numbers, remedy)

    def wait(self) -> None:
        what, numbers, remedy = self._words
        raise PeerLostError(what, numbers=numbers, remedy=remedy)


class _Bucket:
    """One flat buffer and the parameters whose gradients it holds, in the order of backward."""

    def __init__(self, parameters: list[nn.Parameter], world_size: int, device: torch.device) -> None:
        self.parameters = parameters
        self.is_away = device != parameters[0].device
        self.num_grads = sum(p.numel() for p in parameters)
        self._world_size = world_size
        first = parameters[0]
        size = self.num_grads + world_size + len(parameters)
        self.flat = torch.zeros(size, dtype=first.dtype, device=device)
        self.views = self.views_of(self.flat[: self.num_grads])
        self._keys, self._holders = self.flat[self.num_grads :].split([world_size, len(parameters)])
        self.found = [False] * len(parameters)
        self.filled = [False] * len(parameters)
        self.missing: int | None = None  # gradients still to come; None before the last backward
        self.pending: Pending | None = None
        self.outlasts = self.has_left = self.has_come = False
        self._copy: torch.Tensor | None = None

    def own_values(self) -> torch.Tensor | None:
        """This device's own sum, as long as it is there."""
        if not self.has_left:
            return self.flat[: self.num_grads]
        if not self.outlasts:
            return None
        if self.flat.device.type == "cpu":
            return self._copy
        return None if self.has_come else self.flat[: self.num_grads]

    def views_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Each parameter's part of a tensor with the values of all."""
        pieces = flat.split([p.numel() for p in self.parameters])
        return [x.view(p.shape) for x, p in zip(pieces, self.parameters, strict=True)]

    def hand_out(self, gradients: Sequence[torch.Tensor]) -> None:
        """Each parameter gets its gradient, if any device had one."""
        for p, gradient, found in zip(self.parameters, gradients, self.found, strict=True):
            p.grad = gradient if found else None

    def seal(self, rank: int, key: int) -> None:
        """Write the tail and zero what no micro-batch filled."""
        for view, filled in zip(self.views, self.filled, strict=True):
            if not filled:
                view.zero_()
        # Numbers one by one, on the device: a tensor of the host's would wait for all that is queued there.
        self._keys.zero_()[rank : rank + 1].fill_(key)
        self._holders.fill_(1.0)
        for i, filled in enumerate(self.filled):
            if not filled:
                self._holders[i : i + 1].zero_()

    def leave(self) -> float:
        """From here on the values may become those of a sum; the seconds that a copy took before."""
        self.has_left = True
        if not self.outlasts or self.flat.device.type != "cpu":
            return 0.0
        before = time.perf_counter()
        if self._copy is None:
            self._copy = torch.empty_like(self.flat[: self.num_grads])
        self._copy.copy_(self.flat[: self.num_grads])
        return time.perf_counter() - before

    def wait(self) -> None:
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.wait()
            self.has_come = True

    def tail_values(self) -> tuple[list[int], list[int]]:
        """(key of each device, number of devices on which each parameter had a gradient)."""
        tail = [int(x.real) for x in self.flat[self.num_grads :].tolist()]  # of complex parameters too
        return tail[: self._world_size], tail[self._world_size :]


def _lay_out(parameters: list[nn.Parameter], ranks: Ranks, limit: int, homes: Homes) -> list[_Bucket]:
    """Buckets of one dtype each: a reduction of mixed dtypes would abort the process."""
    trained = [p for p in dict.fromkeys(parameters) if p.requires_grad]
    buckets = []
    for dtype in dict.fromkeys(p.dtype for p in reversed(trained)):
        same = [p for p in trained if p.dtype == dtype]
        sizes = [p.numel() * p.element_size() for p in same]
        for row in fill_buckets(sizes, limit):
            held = [same[i] for i in row]
            buckets.append(_Bucket(held, ranks.world_size, homes.summed_on(held[0])))
    return buckets
