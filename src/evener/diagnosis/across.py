"""Which hosts can work together, and how: one NCCL group, Gloo between, or not at all."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from evener.core.figures import Value
from evener.core.host import HostFacts
from evener.diagnosis import builds
from evener.diagnosis.amd import is_integrated
from evener.diagnosis.finding import Finding, read_in
from evener.diagnosis.rules import mixing, version

Transport = Literal["nccl", "rccl", "gloo", "none"]


class Pair(Value, frozen=True, kw_only=True):
    """What two hosts can talk over, and why."""

    a: str
    b: str
    transport: Transport
    why: str


def together(a: HostFacts, b: HostFacts) -> Pair:
    """What the accelerators of two hosts can talk over, from their vendors, builds and versions.

    NCCL and RCCL need one version on both sides and never mix; Gloo serves all else, if torch is of one
    version. Example: CUDA 12.6 with NCCL 2.27.3 and CUDA 13.0 with NCCL 2.29.7 gives "gloo".
    """
    names = {"a": a.host, "b": b.host}
    one, other = a.torch, b.torch
    if one is None or other is None or one.error or other.error:
        return Pair(**names, transport="none", why="torch does not run on both")
    if version(one.version)[:2] != version(other.version)[:2]:
        why = f"torch {one.version} and {other.version} are not of one version"
        return Pair(**names, transport="none", why=why)
    mine, theirs = _library(a), _library(b)
    if mine is None or theirs is None:
        return Pair(**names, transport="gloo", why="not both have accelerators that torch uses")
    if mine != theirs:
        return Pair(**names, transport="gloo", why=f"{mine.upper()} and {theirs.upper()} do not mix")
    if not one.nccl or not other.nccl:
        return Pair(**names, transport="gloo", why=f"the version of {mine.upper()} is unknown on one of them")
    if one.nccl != other.nccl:
        why = f"{mine.upper()} {one.nccl} and {other.nccl} are not of one version"
        return Pair(**names, transport="gloo", why=why)
    return Pair(**names, transport=mine, why=f"{mine.upper()} {one.nccl} on both")


def pairs(hosts: Sequence[HostFacts]) -> tuple[Pair, ...]:
    """Every pair of hosts with what they can talk over."""
    return tuple(together(a, b) for i, a in enumerate(hosts) for b in hosts[i + 1 :])


def across(hosts: Sequence[HostFacts]) -> tuple[Finding, ...]:
    """Findings that only show when hosts are looked at together."""
    return tuple(f for check in CHECKS for f in check(hosts))


def _names(hosts: Sequence[HostFacts]) -> Iterator[Finding]:
    for name, times in Counter(h.host for h in hosts).items():
        if times > 1:
            yield Finding(
                code="DR507",
                grade="fails",
                where=name,
                what="hosts of one job need names of their own",
                evidence=f"{times} hosts are called {name}",
                mend=f"evener probe --host {name}-2 -o fleet.json",
            )


def _torch(hosts: Sequence[HostFacts]) -> Iterator[Finding]:
    found = _by(hosts, lambda h: ".".join(map(str, version(h.torch.version)[:2])) if h.torch else "")
    if len(found) > 1:
        newest = max(found, key=version)
        old = [name for value, names in found.items() if value != newest for name in names]
        yield Finding(
            code="DR503",
            grade="fails",
            where=", ".join(old),
            what="torch is not of one version, and its messages differ between versions",
            evidence=_told(found),
            mend=f'pip install "torch=={newest}.*" --index-url "${builds.INDEX}/VARIANT"',
        )


def _nccl(hosts: Sequence[HostFacts]) -> Iterator[Finding]:
    nvidia = [h for h in hosts if _library(h) == "nccl"]
    found = _by(nvidia, lambda h: (h.torch.nccl or "") if h.torch else "")
    if len(found) < 2:
        return
    codes = [c for h in nvidia for c in map(builds.device_code, h.cards) if c is not None]
    drivers = [h.nvidia.version for h in nvidia if h.nvidia and h.nvidia.version]
    oldest = min(drivers, key=version, default="")
    fitting = builds.wheels_for(codes, nvidia[0].machine, oldest)
    yield Finding(
        code="DR501",
        grade="slow",
        where=", ".join(h.host for h in nvidia),
        what="NCCL is not of one version, so these hosts talk over Gloo",
        evidence=_told(found),
        mend=builds.install_line(fitting[0].variant) + "  # on each" if fitting else "",
        rule=read_in(mixing("nccl")),
    )


def _vendors(hosts: Sequence[HostFacts]) -> Iterator[Finding]:
    cards = [c for h in hosts for c in h.cards if not is_integrated(c)]
    vendors = sorted({c.vendor for c in cards if c.vendor in ("nvidia", "amd")})
    if len(vendors) > 1:
        yield Finding(
            code="DR502",
            grade="slow",
            where=", ".join(h.host for h in hosts if h.cards),
            what="the job has cards of NVIDIA and AMD: two builds of torch, Gloo between them",
            evidence=", ".join(f"{h.host}: {', '.join(sorted({c.vendor for c in h.cards}))}" for h in hosts),
            mend="evener env HOST.json ... -o environments",
            rule=read_in(mixing("rccl")),
        )


def _architectures(hosts: Sequence[HostFacts]) -> Iterator[Finding]:
    codes = sorted({c for h in hosts for c in map(builds.device_code, h.cards) if c is not None})
    groups = builds.by_build(codes)
    if len(groups) > 1:
        yield Finding(
            code="DR505",
            grade="slow",
            where=", ".join(h.host for h in hosts if any(c.vendor == "nvidia" for c in h.cards)),
            what=f"no official build carries all cards: {len(groups)} builds of torch, Gloo between them",
            evidence="; ".join(" ".join(builds.named(c) for c in group) for group in groups),
            mend="evener env HOST.json ... -o environments",
        )


def _python(hosts: Sequence[HostFacts]) -> Iterator[Finding]:
    found = _by(hosts, lambda h: ".".join(map(str, version(h.python)[:2])))
    if len(found) > 1:
        yield Finding(
            code="DR504",
            grade="works",
            where=", ".join(h.host for h in hosts),
            what="Python is not of one version: evener passes no pickles, your own script has to run on all",
            evidence=_told(found),
        )


def _evener(hosts: Sequence[HostFacts]) -> Iterator[Finding]:
    found = _by(hosts, lambda h: h.evener)
    if len(found) > 1:
        newest = max(found, key=version)
        yield Finding(
            code="DR506",
            grade="fails",
            where=", ".join(n for value, names in found.items() if value != newest for n in names),
            what="evener is not of one version, and refuses messages of another",
            evidence=_told(found),
            mend=f"pip install evener=={newest}",
        )


CHECKS: tuple[Callable[[Sequence[HostFacts]], Iterator[Finding]], ...] = (
    _names,
    _torch,
    _evener,
    _vendors,
    _architectures,
    _nccl,
    _python,
)


def _library(facts: HostFacts) -> Literal["nccl", "rccl"] | None:
    """What the cards that torch uses on a host talk over among themselves."""
    if facts.torch is None or all(c.torch_index is None for c in facts.cards):
        return None
    return "nccl" if facts.torch.cuda else "rccl" if facts.torch.hip else None


def _by(hosts: Sequence[HostFacts], value: Callable[[HostFacts], str]) -> dict[str, list[str]]:
    """Host names by a value of theirs; hosts where it is unknown are left out."""
    found: dict[str, list[str]] = {}
    for host in hosts:
        if value(host):
            found.setdefault(value(host), []).append(host.host)
    return found


def _told(found: dict[str, list[str]]) -> str:
    return "; ".join(f"{value}: {', '.join(names)}" for value, names in found.items())
