"""Interfaces of the host, where its name leads, and its routes to peers.

Run as `python -m evener.probing.network [PEER ...]` it tells them in lines as `ask_torch` does: a name server
that does not answer must not hold up all else.
"""

import socket
import sys
from typing import Any

import psutil

from evener.core.host import Interface
from evener.probing.ask_torch import tell

VIRTUAL = (
    *("docker", "br-", "veth", "virbr", "cni", "flannel", "cali", "lxc", "lxd", "podman", "kube", "vmnet"),
    *("tun", "tap", "tailscale", "wg", "zt"),
)
"""How interfaces without hardware begin their names."""
ANY_PORT = 9
FAMILIES = (socket.AF_INET, socket.AF_INET6)


def interfaces() -> tuple[Interface, ...]:
    """The host's interfaces in the kernel's order, which is the order in which others try them."""
    addresses, states = psutil.net_if_addrs(), psutil.net_if_stats()
    order = {name: index for index, name in socket.if_nameindex()}
    found = []
    for name in sorted(addresses, key=lambda n: order.get(n, len(order) + 1)):
        state = states.get(name)
        own = [a.address.partition("%")[0] for a in addresses[name] if a.family in FAMILIES]
        found.append(
            Interface(
                name=name,
                up=bool(state and state.isup),
                addresses=tuple(own),
                bits_per_s=state.speed * 1e6 if state and state.speed else None,
                virtual=is_virtual(name),
            )
        )
    return tuple(found)


def is_virtual(name: str) -> bool:
    """Whether an interface is a bridge, a tunnel or a container's end. Examples: docker0 is, eth0 is not."""
    return name.startswith(VIRTUAL)


def route(peer: str) -> dict[str, Any]:
    """From which address the host would reach a peer (no packet is sent), or why it would not."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(peer, ANY_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as s:
            s.connect(address)
            return {"peer": peer, "address": str(s.getsockname()[0])}
    except OSError as e:
        return {"peer": peer, "error": e.strerror or str(e)}


def main(peers: list[str]) -> None:
    """Tell where the own name leads, then a line for each peer."""
    try:
        found = {str(a[4][0]) for a in socket.getaddrinfo(socket.gethostname(), None)}
    except OSError:
        found = set()
    tell("name", addresses=sorted(found))
    for peer in peers:
        tell("route", **route(peer))


if __name__ == "__main__":
    main(sys.argv[1:])
