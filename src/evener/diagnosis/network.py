"""Which interface a host would use towards others, and whether it is the one that leads there."""

from collections.abc import Iterator

from evener.core.host import HostFacts, Interface
from evener.diagnosis.finding import Finding

CHOICES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
FASTER = 2.0


def network(facts: HostFacts, *, peers: bool) -> Iterator[Finding]:
    """Findings on the network; without `peers` what only several hosts suffer from is graded "works"."""
    peers = peers or any(r.interface != "lo" for r in facts.routes)
    yield from _named(facts)
    for route in facts.routes:
        if not route.interface:
            yield Finding(
                code="DR305",
                grade="fails",
                where=facts.host,
                what=f"there is no way to {route.peer}",
                evidence=route.error or "no route",
                mend=f"ip route get {route.peer}  # and open the firewall between both for all ports",
            )
    if any(facts.setting(name) for name in CHOICES):
        return
    wanted = _towards_peers(facts)
    line = " ".join(f"{name}={wanted}" for name in CHOICES) if wanted else ""
    mend = f"export {line}" if line else "export GLOO_SOCKET_IFNAME=INTERFACE NCCL_SOCKET_IFNAME=INTERFACE"
    grade = "fails" if peers else "works"
    loops = [a for a in facts.resolves_to if a.startswith("127.") or a == "::1"]
    if loops and len(loops) == len(facts.resolves_to):
        yield Finding(
            code="DR302",
            grade=grade,  # type: ignore[arg-type]
            where=facts.host,
            what="the host's own name leads to itself, and Gloo tells others that address",
            evidence=f"{facts.host} is {', '.join(facts.resolves_to)}",
            mend=mend,
            rule="https://github.com/aws-samples/aws-do-eks/pull/69 (2026-08-15)",
        )
    first = _first(facts)
    if first and first.virtual and first.name != wanted:
        yield Finding(
            code="DR301",
            grade=grade,  # type: ignore[arg-type]
            where=facts.host,
            what=f"the first interface is {first.name}, which leads to no other host",
            evidence=f"{first.name} {', '.join(first.addresses)}; others: {_others(facts, first)}",
            mend=mend,
            rule="https://github.com/NVIDIA/nccl/issues/913 (2023-07-11)",
        )
    yield from _slower(facts)


def _named(facts: HostFacts) -> Iterator[Finding]:
    """A setting that names an interface; Gloo takes one name, NCCL prefixes and what to leave out (^)."""
    for name in CHOICES:
        value = facts.setting(name)
        if not value or not facts.interfaces:
            continue
        up = [i.name for i in facts.interfaces if i.up]
        wanted = _towards_peers(facts) or next((n for n in up if n != "lo"), "lo")
        if name.startswith("GLOO") and value.startswith("^"):
            what = f"{name} takes one name, not what to leave out"
        elif value.startswith("^"):
            continue
        elif not any(_matches(name, word, u) for word in value.split(",") for u in up):
            what = f"{name} names no interface that is up"
        elif value == "lo" and facts.routes:
            what = f"{name} names the loopback, which leads to no other host"
        else:
            continue
        yield Finding(
            code="DR303",
            grade="fails",
            where=facts.host,
            what=what,
            evidence=f"{name}={value}; up: {', '.join(up)}",
            mend=f"export {name}={wanted}",
            rule="https://github.com/aws-samples/aws-do-eks/pull/51 (2026-08-08)",
        )


def _matches(setting: str, word: str, interface: str) -> bool:
    if setting.startswith("GLOO"):
        return word.strip() == interface
    return interface.startswith(word.strip().lstrip("="))


def _slower(facts: HostFacts) -> Iterator[Finding]:
    by_name = {i.name: i for i in facts.interfaces}
    for route in facts.routes:
        used = by_name.get(route.interface)
        if used is None or not used.bits_per_s:
            continue
        best = max(_real(facts), key=lambda i: i.bits_per_s or 0.0, default=used)
        if (best.bits_per_s or 0.0) < FASTER * used.bits_per_s:
            continue
        yield Finding(
            code="DR304",
            grade="slow",
            where=facts.host,
            what=f"{route.peer} is reached over {used.name}, and {best.name} is faster",
            evidence=f"{used.name} {used.bits_per_s / 1e9:g} Gbit/s, {best.name} "
            f"{(best.bits_per_s or 0) / 1e9:g} Gbit/s",
            mend=f"export GLOO_SOCKET_IFNAME={best.name} NCCL_SOCKET_IFNAME={best.name}",
            rule="https://github.com/NVIDIA/nccl/issues/1580 (2025-01-19)",
        )


def _towards_peers(facts: HostFacts) -> str:
    """The interface of the first route, else the only real one; "" where neither tells."""
    routed = next((r.interface for r in facts.routes if r.interface not in ("", "lo")), "")
    real = _real(facts)
    return routed or (real[0].name if len(real) == 1 else "")


def _real(facts: HostFacts) -> list[Interface]:
    return [i for i in facts.interfaces if i.up and i.addresses and i.name != "lo" and not i.virtual]


def _first(facts: HostFacts) -> Interface | None:
    usable = [i for i in facts.interfaces if i.up and i.addresses and i.name != "lo"]
    return usable[0] if usable else None


def _others(facts: HostFacts, first: Interface) -> str:
    return ", ".join(i.name for i in facts.interfaces if i.name not in (first.name, "lo")) or "none"
