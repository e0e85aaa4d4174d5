"""Which devices sum their gradients together first, as it follows from where they are and who made them.

lab1: gpu0 gpu1 cpu     1. lab1/gpu0 lab1/gpu1 (nccl)      2. lab1/gpu0 lab1/cpu (gloo)
lab2: gpu0 gpu1         1. lab2/gpu0 lab2/gpu1 (nccl)      3. lab1/gpu0 lab2/gpu0 (nccl)
"""

from collections.abc import Collection, Sequence

from evener.core.fleet import Fleet
from evener.core.plan import Reduction
from evener.cost.exchange import transport_of


def reduction_groups(
    fleet: Fleet, devices: Sequence[str], *, no_direct: Collection[str] = ()
) -> tuple[Reduction, ...]:
    """The groups in order: alike accelerators of a host, then all of a host, then one device of each host.

    Each group hands its sum on by its first device, and the way back is the same. `no_direct` are hosts on
    which NCCL was found not to work, so that their groups take Gloo. A group of one is none. UnknownNameError
    for a device the fleet does not hold. Example: two cards each on two hosts: nccl, nccl, nccl between the
    firsts.
    """
    hosts: dict[str, dict[str, list[str]]] = {}
    for name in devices:
        device = fleet.device(name)
        hosts.setdefault(device.host, {}).setdefault(device.type, []).append(name)
    alike, inside = [], []
    for host, by_type in hosts.items():
        for type_, names in by_type.items():
            transport = transport_of({type_}) if host not in no_direct else "gloo"
            if len(names) > 1:
                why = f"alike on {host}: the fastest hops first"
                alike.append(_group(names, transport, why if transport != "gloo" else f"on {host}"))
        firsts = [names[0] for names in by_type.values()]
        if len(firsts) > 1:
            types = ", ".join(by_type)
            inside.append(_group(firsts, "gloo", f"{types} on {host} share no transport but Gloo"))
    return (*alike, *inside, *_between(fleet, hosts, no_direct))


def _between(
    fleet: Fleet, hosts: dict[str, dict[str, list[str]]], no_direct: Collection[str]
) -> tuple[Reduction, ...]:
    """One device of each host: the first, which holds its host's sum."""
    leaders = [next(iter(by_type.values()))[0] for by_type in hosts.values()]
    if len(leaders) < 2:
        return ()
    types = {fleet.device(n).type for n in leaders}
    transport = "gloo" if no_direct else transport_of(types)
    why = "between hosts, one device each: the slow links carry each sum once"
    if len(types) > 1:
        why += f"; {' and '.join(sorted(types))} share no transport but Gloo"
    return (_group(leaders, transport, why),)


def _group(names: Sequence[str], transport: str, reason: str) -> Reduction:
    return Reduction(devices=tuple(names), transport=transport, reason=reason)
