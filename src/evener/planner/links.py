"""Which links a plan needs: neighbours in a pipeline, and devices that sum the same gradients."""

from collections import defaultdict
from collections.abc import Iterator

from evener.core.collectives import ring_order
from evener.core.fleet import Fleet
from evener.core.plan import Plan
from evener.core.routes import Routes
from evener.errors import UnknownNameError

UNLINKED = "unlinked"
"""What `Job.allow` names to let data between devices without a link cost nothing, flagged in the result."""


def check_links(fleet: Fleet, plan: Plan) -> None:
    """UnknownNameError naming the first two devices that `plan` makes talk and `fleet` does not link."""
    for a, b in _talking(fleet, plan):
        if a != b and fleet.link(a, b) is None:
            hosts = [fleet.device(n).host for n in (a, b)]
            raise UnknownNameError(
                f"the fleet names no link between {a} and {b}, over which the plan sends data",
                numbers=f"{len(fleet.devices)} devices, {len(fleet.links)} links",
                remedy=(
                    f'{{"a": "{hosts[0]}", "b": "{hosts[1]}", "kind": "1 Gbit/s Ethernet"}} (or what it is) '
                    "among the links of the fleet file, `evener probe`, or --allow unlinked to let it cost "
                    "nothing"
                ),
            )


def _talking(fleet: Fleet, plan: Plan) -> Iterator[tuple[str, str]]:
    routes = Routes(plan)
    holders: dict[str, dict[str, None]] = defaultdict(dict)
    for route in routes.stages:
        for share in route.stage.shares:
            yield from zip(share.devices, share.devices[1:], strict=False)
        for layer in route.stage.layers:
            holders[layer].update(dict.fromkeys(route.devices))
        if route.sizes and not route.is_last:
            for piece in routes.forward_pieces(route.number, 0):
                yield piece.source, piece.target
    for parts, held in {(tuple(o.parts.items()), tuple(holders[o.layer])) for o in plan.owners}:
        yield from ((a, b) for b, part in parts if part for a in held)
    for names in {tuple(held) for held in holders.values()}:
        order = ring_order(fleet, names)
        yield from zip(order, order[1:] + order[:1], strict=True)
