"""What it costs to go from one plan to another: nothing between equal holdings, else layers and state."""

from evener.core.fleet import Fleet
from evener.core.plan import Plan
from evener.core.profile import Profile

REGROUP_S = 1.0
"""Seconds to form new groups, cut the model anew and build new optimisers (assumed)."""
UNKNOWN_BYTES_PER_S = 1e8
"""Assumed of a link that the fleet does not name."""


def same_holdings(old: Plan, new: Plan) -> bool:
    """Whether every device holds the same layers in the same places under both: only samples differ."""
    return _places(old) == _places(new)


def _places(plan: Plan) -> list:
    return [
        [(stage.layers, [s.devices for s in stage.shares], stage.precision) for stage in p.stages]
        for p in plan.pipelines
    ]


def move_seconds(old: Plan, new: Plan, profile: Profile, fleet: Fleet) -> float:
    """Seconds until `new` runs: 0 for equal holdings, else regrouping and the slowest device's incoming
    layers.

        REGROUP_S + max over devices d of (bytes of layers new to d, with optimiser state) / link to a holder

    State is shared out over the layers by their parameters. Example: 10 MB of layers and 20 MB of state over
    1 ms + 1 GB/s: 1.031 s.
    """
    if same_holdings(old, new):
        return 0.0
    params = sum(x.param_bytes for x in profile.layers)
    more = 1 + (profile.state_bytes / params if params else 0.0)
    held_bytes = {x.name: x.param_bytes * more + x.buffer_bytes for x in profile.layers}
    before, after = _held(old), _held(new)
    slowest = 0.0
    for device, layers in after.items():
        missing = layers - before.get(device, set())
        sources = [d for d, held in before.items() if held & missing and d != device]
        num_bytes = sum(held_bytes.get(name, 0.0) for name in missing)
        if missing and sources:
            slowest = max(slowest, min(_transfer_s(fleet, s, device, num_bytes) for s in sources))
    return REGROUP_S + slowest


def _held(plan: Plan) -> dict[str, set[str]]:
    held: dict[str, set[str]] = {}
    for _, _, stage in plan.numbered_stages():
        for share in stage.shares:
            for device in share.devices:
                held.setdefault(device, set()).update(stage.layers)
    return held


def _transfer_s(fleet: Fleet, source: str, target: str, num_bytes: float) -> float:
    link = fleet.link(source, target)
    return link.curve.seconds(num_bytes) if link else num_bytes / UNKNOWN_BYTES_PER_S
