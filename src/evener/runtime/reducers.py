"""Every parameter's gradient is summed over exactly the devices that hold it, wherever the cuts are.

Segments (see `segments.py`) with the same devices share a group, in which all launch in one order: later
layers first, as backward meets them; tied weights by their first layer.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from evener.core.buckets import BUCKET_BYTES
from evener.core.seams import Wire
from evener.runtime.buckets import GradientBuckets
from evener.runtime.owning.gradients import OwnedGradients
from evener.runtime.ranks import Ranks
from evener.runtime.residing.homes import Homes
from evener.runtime.segments import Segment, Stages
from evener.runtime.tables.sums import TableSums


@dataclass
class _Group:
    buckets: GradientBuckets | OwnedGradients | TableSums
    segments: list[Stages]  # by number in `buckets`: the stages of this device that hold it
    leads: bool  # whether this device counts the group's gradients in norms


class Reducers:
    """All sums of this device's gradients, group by group."""

    def __init__(self, groups: list[_Group], *, everywhere: bool) -> None:
        self._groups, self.everywhere = groups, everywhere
        self._open: list[list[set[int]]] = []
        self._step = -1

    def add_tables(self, sums: TableSums, num_devices: int) -> None:
        """Tables take part in every step's sums. Called on all devices: their parts of the norm differ."""
        self._groups.append(_Group(sums, [], True))
        self.everywhere = self.everywhere and num_devices == 1

    @property
    def _in_buckets(self) -> list[GradientBuckets]:
        return [g.buckets for g in self._groups if isinstance(g.buckets, GradientBuckets)]

    def hold_back(self, ended: Callable[[], str | None]) -> None:
        """See `GradientBuckets.hold_back`."""
        for buckets in self._in_buckets:
            buckets.hold_back(ended)

    def outlast(self, *, yes: bool) -> None:
        """See `GradientBuckets.outlast`."""
        for buckets in self._in_buckets:
            buckets.outlast(yes=yes)

    @property
    def copied_s(self) -> float:
        """Seconds that copies of own sums took in the last step."""
        return sum(buckets.copied_s for buckets in self._in_buckets)

    def own_sums(self) -> dict[nn.Parameter, torch.Tensor] | None:
        """This device's own sums of the step under way; None where some are not there on their own."""
        found: dict[nn.Parameter, torch.Tensor] = {}
        for buckets in self._in_buckets:
            own = buckets.own_sums()
            if own is None:
                return None
            found |= own
        return found if len(self._in_buckets) == len(self._groups) else None

    def put(self, sums: Mapping[nn.Parameter, torch.Tensor]) -> None:
        """Begin the step under way with `sums`, as `own_sums` gave them."""
        for buckets in self._in_buckets:
            buckets.put(sums)

    def begin_step(self, step: int) -> None:
        """Every stage of this device still has a backward before it."""
        self._step = step
        self.discard()
        self._open = [[set(stages) for stages in group.segments] for group in self._groups]

    def begin(self, scale: float) -> None:
        """The next backward's gradients count `scale` times."""
        for group in self._groups:
            group.buckets.begin(scale)

    def take(self, gradients: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Gradients that a backward in two parts gave."""
        for p, grad in gradients:
            for group in self._groups:
                group.buckets.take(p, grad)

    def last_backward(self, stage: int) -> None:
        """The next backward is the last of `stage`: gradients that no other stage adds to may leave."""
        for group, open_ in zip(self._groups, self._open, strict=True):
            for number, stages in enumerate(open_):
                if stages == {stage} and len(group.segments[number]) == 1:
                    group.buckets.arm(self._step, number)

    def done(self, stage: int) -> None:
        """`stage` has no backward left in this step."""
        for group, open_ in zip(self._groups, self._open, strict=True):
            for number, stages in enumerate(open_):
                if stage in stages:
                    stages.discard(stage)
                    if not stages:
                        group.buckets.release(self._step, number)

    def launch_rest(self) -> None:
        for group in self._groups:
            group.buckets.launch_rest(self._step)

    def wait(self) -> None:
        for group in self._groups:
            group.buckets.wait()

    def finish(self, divide_by: float) -> None:
        """Hand out each parameter's `.grad`, the sum over its holders divided by `divide_by`."""
        for group in self._groups:
            group.buckets.finish(divide_by)

    def hand_over(self) -> None:
        """Gradients go to where their parameters live, see `GradientBuckets.hand_over`."""
        for buckets in self._in_buckets:
            buckets.hand_over()

    def sums_of(self, parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
        """Where the summed gradient of each of `parameters` lies, which are all in buckets."""
        found = ([x for b in self._in_buckets if (x := b.sum_of(p)) is not None] for p in parameters)
        return [views[0] for views in found]

    def discard(self) -> None:
        for group in self._groups:
            group.buckets.discard()

    def square_norm(self) -> float:
        """Σ gradient² over the parameters that this device counts: each parameter on one device only."""
        norms = [g.buckets.norm().double() for g in self._groups if g.leads or self.everywhere]
        return float(torch.stack([n.cpu().square() for n in norms]).sum()) if norms else 0.0

    def multiply(self, factor: float) -> None:
        for group in self._groups:
            group.buckets.multiply(factor)

    def close(self) -> None:
        for group in self._groups:
            group.buckets.close()


def reducers_for(
    segments: Sequence[Segment],
    here: str,
    stages_here: Stages,
    parameters: Mapping[str, nn.Parameter],
    wire_among: Callable[[tuple[str, ...]], Wire],
    num_devices: int,
    homes: Homes | None = None,
) -> Reducers:
    """The sums that device `here` takes part in; `wire_among(devices)` is the wire of each group."""
    mine = [s for s in segments if here in s.devices]
    groups = []
    for devices in dict.fromkeys(s.devices for s in mine):
        held = [
            (s.stages & stages_here, [parameters[n] for n in s.names if parameters[n].requires_grad])
            for s in mine
            if s.devices == devices
        ]
        held = [(stages, trained) for stages, trained in held if trained]
        if held:
            buckets = GradientBuckets(
                [trained for _, trained in held], Ranks(devices, here), wire_among(devices), homes=homes
            )
            groups.append(_Group(buckets, [stages for stages, _ in held], devices[0] == here))
    return Reducers(groups, everywhere=all(len(s.devices) == num_devices for s in segments))


def reducers_of_one_model(
    model: nn.Module,
    ranks: Ranks,
    wire: Wire,
    stage: int = 0,
    limit: int = BUCKET_BYTES,
    homes: Homes | None = None,
) -> Reducers:
    """The sums of data parallelism: every device holds the whole model as its one stage `stage`."""
    if not any(p.requires_grad for p in model.parameters()):
        return Reducers([], everywhere=True)
    group = _Group(
        GradientBuckets([list(model.parameters())], ranks, wire, limit, homes),
        [frozenset({stage})],
        ranks.rank == 0,
    )
    return Reducers([group], everywhere=True)


def owners_reducers(
    owned: Iterable[tuple[Stages, OwnedGradients]], others: Reducers | None = None
) -> Reducers:
    """`others`, and the sums of what is held in parts with the stages of this device that hold it.

    Each device counts what it owns in norms.
    """
    groups = [_Group(gradients, [stages], True) for stages, gradients in owned]
    return Reducers([*(others._groups if others else ()), *groups], everywhere=False)
