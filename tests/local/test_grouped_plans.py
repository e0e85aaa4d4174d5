"""Plans of several stages whose sums go over groups: random plans, random groupings, exact to rounding."""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import pytest
from msgspec.structs import replace as renewed

from benchmarks.shape_instances import Instance, draw, error_of, names_of, run_instances
from evener.core.plan import Reduction
from tests.local.pool import Pool

FAMILIES = ("sequential", "text", "residual")


def grouping(rng: random.Random, devices: Sequence[str], among: tuple[str, ...]) -> list[Reduction]:
    """Two or more groups of `devices` in any way, and one or two lanes in any parts between them."""
    mixed = rng.sample(devices, len(devices))
    count = rng.randint(2, len(mixed))
    groups = [mixed[i::count] for i in range(count)]
    found = [Reduction(devices=tuple(g), transport="gloo", among=among) for g in groups if len(g) > 1]
    for part in rng.choice(((1.0,), (0.3, 0.7), (0.5, 0.0))):
        lane = tuple(rng.choice(g) for g in groups)
        adds = dict(zip(lane, rng.choices((1.0, 2.0, 5.0), k=len(lane)), strict=True))
        found.append(Reduction(devices=lane, transport="gloo", part=part, adds=adds, among=among))
    return found


def grouped(rng: random.Random, instance: Instance, world_size: int) -> Instance:
    """The instance with a grouping for every set of devices that may hold a layer together."""
    names, found = names_of(world_size), []
    for size in range(2, world_size + 1):
        for devices in combinations(names, size):
            found += grouping(rng, devices, devices if size < world_size else ())
    return replace(instance, plan=renewed(instance.plan, reductions=tuple(found)), dtype="float64")


@pytest.mark.parametrize("world_size", [3, 4])
def test_sums_over_groups_are_exact_wherever_the_cuts_are(pool: Pool, world_size: int) -> None:
    rng = random.Random(world_size)
    drawn = draw(11, 6 * len(FAMILIES), FAMILIES)[world_size]
    instances = [grouped(rng, x, world_size) for x in drawn]
    assert any(len(p.stages) > 1 for x in instances for p in x.plan.pipelines)
    by_rank = pool.run(run_instances, world_size, instances, timeout_s=100.0)
    for instance, held in zip(instances, zip(*by_rank, strict=True), strict=True):
        assert error_of(instance, held) <= instance.bound, instance
