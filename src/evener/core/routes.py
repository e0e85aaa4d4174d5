"""Who holds which samples of each micro-batch, and which pieces travel between neighbouring stages.

stage 0   share a: samples 0..2   share b: 3       a ──0..1──► c        the pieces are the overlaps of
stage 1   share c: samples 0..1   share d: 2..3    a ──2─────► d        sample ranges, so that nothing
                                                   b ──3─────► d        is sent twice or left out
"""

from dataclasses import dataclass
from functools import cached_property

from evener.core.plan import Plan, Share, Stage
from evener.core.split import apportion, spans_of
from evener.errors import PlanMismatchError


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Samples of one micro-batch that go from one device to another; both may be the same device."""

    source: str
    target: str
    samples: int


@dataclass(frozen=True, kw_only=True)
class StageRoute:
    """One stage of the plan: its number, its place in its pipeline, and its micro-batches' sizes."""

    number: int
    pipeline: int
    position: int
    num_stages: int
    stage: Stage
    sizes: tuple[int, ...]

    @property
    def is_first(self) -> bool:
        return self.position == 0

    @property
    def is_last(self) -> bool:
        return self.position == self.num_stages - 1

    @cached_property
    def devices(self) -> tuple[str, ...]:
        return tuple(name for share in self.stage.shares for name in share.devices)


class Routes:
    """The plan's stages by number, and what each device gets of each micro-batch.

    PlanMismatchError when a device has two shares of one stage.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        places = [(which, at) for which, p in enumerate(plan.pipelines) for at in range(len(p.stages))]
        self.stages = tuple(
            StageRoute(
                number=number,
                pipeline=which,
                position=at,
                num_stages=len(plan.pipelines[which].stages),
                stage=plan.pipelines[which].stages[at],
                sizes=plan.pipelines[which].micro_batch_sizes,
            )
            for number, (which, at) in enumerate(places)
        )
        for route in self.stages:
            if len(set(route.devices)) < len(route.devices):
                raise PlanMismatchError(
                    f"stage {route.number} names a device in two of its shares",
                    numbers=f"devices: {', '.join(route.devices)}",
                    remedy="one share with the samples of both",
                )
        self._shares: dict[tuple[int, int], dict[str, int]] = {}
        self._backwards: dict[tuple[int, str], int] = {}
        self._pieces: dict[tuple[int, int, int], tuple[Piece, ...]] = {}

    @cached_property
    def devices(self) -> tuple[str, ...]:
        return self.plan.devices

    def num_micro_batches(self, stage: int) -> int:
        return len(self.stages[stage].sizes)

    def num_backwards(self, stage: int, device: str) -> int:
        """Micro-batches of `stage` in which `device` has samples."""
        key = (stage, device)
        if key not in self._backwards:
            numbers = range(self.num_micro_batches(stage))
            self._backwards[key] = sum(1 for m in numbers if self.samples(stage, device, m))
        return self._backwards[key]

    def samples(self, stage: int, device: str, micro_batch: int) -> int:
        """Samples of `micro_batch` that `device` takes in `stage`; 0 where its share rounds to none."""
        size = self.stages[stage].sizes[micro_batch]
        key = (stage, size)
        if key not in self._shares:
            shares = self.stages[stage].stage.shares
            split = apportion(size, [s.samples for s in shares])
            self._shares[key] = {
                name: n for share, n in zip(shares, split, strict=True) for name in share.devices
            }
        return self._shares[key].get(device, 0)

    def forward_pieces(self, stage: int, micro_batch: int) -> tuple[Piece, ...]:
        """What `stage` hands to the next one after its forward; nothing from the last stage."""
        return () if self.stages[stage].is_last else self._between(stage, stage + 1, micro_batch)

    def backward_pieces(self, stage: int, micro_batch: int) -> tuple[Piece, ...]:
        """What `stage` hands to the one before after its backward; nothing from the first stage."""
        return () if self.stages[stage].is_first else self._between(stage, stage - 1, micro_batch)

    def _between(self, source: int, target: int, micro_batch: int) -> tuple[Piece, ...]:
        size = self.stages[source].sizes[micro_batch]
        key = (source, target, size)
        if key not in self._pieces:
            self._pieces[key] = tuple(_overlaps(self.stages[source].stage, self.stages[target].stage, size))
        return self._pieces[key]

    def work(self, device: str) -> list[tuple[int, int]]:
        """(stage, micro-batch) pairs that `device` runs, in order of stage."""
        return [
            (route.number, m)
            for route in self.stages
            if device in route.devices
            for m in range(len(route.sizes))
            if self.samples(route.number, device, m)
        ]


def _overlaps(source: Stage, target: Stage, size: int):
    """Every member of a tensor-parallel group needs all samples of its share; sources take turns to send."""
    sources, targets = _ranges(source, size), _ranges(target, size)
    for share_to, (low_to, high_to) in targets:
        for share_from, (low, high) in sources:
            samples = min(high, high_to) - max(low, low_to)
            if samples > 0:
                for turn, name in enumerate(share_to.devices):
                    yield Piece(
                        source=share_from.devices[turn % len(share_from.devices)],
                        target=name,
                        samples=samples,
                    )


def _ranges(stage: Stage, size: int) -> list[tuple[Share, tuple[int, int]]]:
    split = apportion(size, [s.samples for s in stage.shares])
    return list(zip(stage.shares, spans_of(split), strict=True))
