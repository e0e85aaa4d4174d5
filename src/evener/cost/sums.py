"""How each sum of a plan's gradients goes: chosen for every set of devices that hold the same layers.

pipeline 0 on a/0 a/1, b/0     a/0 a/1: layers 0 1 | b/0: layers 2 3     layers 0 1: a/0 a/1 b/1 c/0
pipeline 1 on b/1 c/0          b/1: shares of layers 0 … 3 with c/0      layers 2 3: b/0 b/1 c/0
"""

from collections.abc import Sequence

from msgspec.structs import replace

from evener.core.buckets import fill_buckets
from evener.core.plan import Plan
from evener.cost.evaluate import CostModel
from evener.cost.exchange import choose_way, compressed_parts


def with_groups(model: CostModel, plan: Plan, *, sums: str = "auto", compress: Sequence[str] = ()) -> Plan:
    """`plan` with the way that each of its sums over several hosts goes; one that says so stays as it is.

    Sums inside a host, and those of tensor-parallel groups, stay one ring. Two sums over one link at once are
    not seen. What compression loses joins `inexact`.
    """
    if plan.reductions:
        return plan
    found = []
    for devices, sizes in gradient_sets(model, plan).items():
        if len({model.fleet.device(d).host for d in devices}) < 2:
            continue
        among = devices if set(devices) != set(plan.devices) else ()
        choice = choose_way(model.fleet, devices, sizes, sums=sums, compress=compress)
        found += [replace(r, among=among) for r in choice.reductions]
    lossy = tuple(x for x in compressed_parts(found) if x not in plan.inexact)
    return replace(plan, reductions=tuple(found), inexact=(*plan.inexact, *lossy))


def gradient_sets(model: CostModel, plan: Plan) -> dict[tuple[str, ...], list[float]]:
    """By set of two or more holders, in the plan's order, the bytes of the buffers that they sum.

    Layers of tensor-parallel groups are left out. Tied layers are summed with the first of them, by the
    holders of all.
    """
    layers = [layer.name for layer in model.profile.layers]
    holders: dict[str, set[str]] = {name: set() for name in layers}
    parted: set[str] = set()
    for _, _, stage in plan.numbered_stages():
        for name in stage.layers:
            holders[name].update(d for share in stage.shares for d in share.devices)
        if any(len(share.devices) > 1 for share in stage.shares):
            parted.update(stage.layers)
    for first, places in model.bytes.tied.items():
        holders[layers[first]] = holders[layers[first]].union(*(holders[layers[i]] for i in places))
    runs: list[tuple[tuple[str, ...], list[int]]] = []
    for name, num_bytes in zip(layers, model.bytes.summed, strict=True):
        devices = tuple(d for d in plan.devices if d in holders[name])
        if len(devices) < 2 or name in parted or not num_bytes:
            continue
        if not runs or runs[-1][0] != devices:
            runs.append((devices, []))
        runs[-1][1].append(int(num_bytes))
    found: dict[tuple[str, ...], list[float]] = {}
    for devices, sizes in runs:
        buckets = fill_buckets(sizes, model.bytes.bucket_bytes)
        found.setdefault(devices, []).extend(float(sum(sizes[i] for i in bucket)) for bucket in buckets)
    return found
