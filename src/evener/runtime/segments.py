"""Which parameters the same stages hold, and so which devices sum their gradients.

pipeline 0 on a, b     a: layers 0 1 2 3 | b: layers 4 … 7     layers 0 1: stages 0 2, devices a c
pipeline 1 on c, d     c: layers 0 1 | d: layers 2 … 7         layers 2 3: stages 0 3, devices a d
                                                               layers 4 …: stages 1 3, devices b d
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Stages = frozenset[int]


@dataclass(frozen=True)
class Segment:
    """Parameters (by the user's name) held by one set of stages, and their place in the launch order."""

    stages: Stages
    devices: tuple[str, ...]
    names: tuple[str, ...]


def segments_of(
    names_by_stage: Mapping[int, Sequence[str]],
    devices_by_stage: Mapping[int, Sequence[str]],
    ties: Mapping[str, str],
    order: Sequence[str],
) -> tuple[Segment, ...]:
    """The segments of a plan in launch order, the same on every device.

    `ties` maps a name to the name under which its shared storage counts; `order` is the model's parameters in
    chain order. Example: stages {0: [x.weight], 1: [x.weight, y.weight]} on devices a and b give
    (y.weight on b), (x.weight on a and b).
    """
    holders: dict[str, set[int]] = {}
    for stage, names in names_by_stage.items():
        for name in names:
            holders.setdefault(ties.get(name, name), set()).add(stage)
    place = {name: i for i, name in enumerate(order)}
    # One order of devices for all: (a, b) and (b, a) would be two groups whose sums overtake one another.
    everyone = list(dict.fromkeys(d for s in sorted(devices_by_stage) for d in devices_by_stage[s]))
    by_stages: dict[Stages, list[str]] = {}
    for name in sorted(holders, key=place.__getitem__):
        by_stages.setdefault(frozenset(holders[name]), []).append(name)
    found = [
        Segment(
            stages=stages,
            devices=tuple(d for d in everyone if any(d in devices_by_stage[s] for s in stages)),
            names=tuple(names),
        )
        for stages, names in by_stages.items()
    ]
    return tuple(sorted(found, key=lambda s: place[s.names[0]], reverse=True))
