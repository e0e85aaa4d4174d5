"""Devices and links of a job, as `evener probe` measures them or a person writes them."""

from collections import Counter
from functools import cached_property

from msgspec.structs import replace

from evener.core.figures import Curve, Figure, Value
from evener.errors import UnknownNameError

FAMILIES = ("matmul", "attention", "convolution", "other")
"""Families of operations that a rehearsal paces apart."""
LONGEST_NAME = 200
REHEARSED = "rehearsal"
"""The `type` of an accelerator that is rehearsed: what torch calls it."""


class Rehearsed(Value, frozen=True, kw_only=True):
    """What only the pacing of a rehearsal knows about a device; the planner never reads it.

    `factors` maps an operation family (one of `FAMILIES`) to the part of the nominal rate it reaches:
    {"matmul": 0.7} runs matrix products at 0.7 of `flops`. The blocks of a device's allocator are `smaller`
    times smaller, where its memory is. With `noise` every action of a run takes about 1 + noise times as
    long, drawn with a heavy tail (`rehearsal/trouble.py`); measuring the model is not disturbed.
    """

    factors: dict[str, float] = {}
    noise: float = 0.0
    smaller: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.smaller < float("inf"):
            raise ValueError(f"smaller must be 1 or more, got {self.smaller}")
        if not 0 <= self.noise < float("inf"):
            raise ValueError(f"noise must be 0 or more, got {self.noise}")
        for family, factor in self.factors.items():
            if family not in FAMILIES:
                raise ValueError(f"factors name {family!r}, not one of {', '.join(FAMILIES)}")
            if not 0 < factor < float("inf"):
                raise ValueError(f"factor of {family!r} must be positive, got {factor}")


class Disk(Value, frozen=True, kw_only=True):
    """What a host's disk does beyond its page cache, in bytes a second, and the bytes that are free on it."""

    read_bytes_per_s: Figure
    write_bytes_per_s: Figure
    free_bytes: Figure

    def seconds(self, read: float, written: float) -> float:
        """To read and write so many bytes. Example: 1 GB each at 1 and 0.5 GB/s: 3 s."""
        return read / self.read_bytes_per_s.value + written / self.write_bytes_per_s.value


class Device(Value, frozen=True, kw_only=True):
    """One thing that computes. Identity is `name` plus `hardware_id`, never an index.

    `flops` is the measured rate of matrix products by dtype, in FLOP/s; a dtype that is absent is not usable.
    `launch_s` is the fixed cost of one operation; `bytes_per_s` the memory bandwidth. `disk` is that of the
    host of a CPU, where the optimiser's state may lie.
    """

    name: str
    kind: str
    type: str = "cpu"
    hardware_id: str = ""
    index: int | None = None
    threads: int | None = None
    memory_bytes: Figure | None = None
    free_memory_bytes: Figure | None = None
    framework_bytes: Figure | None = None
    flops: dict[str, Figure] = {}
    bytes_per_s: Figure | None = None
    launch_s: Figure | None = None
    price_per_hour: Figure | None = None
    watts: Figure | None = None
    disk: Disk | None = None
    rehearsed: Rehearsed | None = None

    def __post_init__(self) -> None:
        for word, text in (("name", self.name), ("kind", self.kind)):
            if len(text) > LONGEST_NAME:
                raise ValueError(f"a device's {word} has {len(text)} characters, at most {LONGEST_NAME}")
        host, slash, local = self.name.partition("/")
        if not (host and slash and local) or "/" in local or self.name != self.name.strip():
            raise ValueError(f"device name must read host/device, got {self.name!r}")
        if not self.kind:
            raise ValueError(f"device {self.name!r} needs a kind")
        for figure, most, what in self._bounded():
            if figure is not None and figure.value > most:
                raise ValueError(f"device {self.name!r} has {what} of {figure.value:.3g}: at most {most:.3g}")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"device {self.name!r} needs 1 thread or more, got {self.threads}")

    def _bounded(self) -> list[tuple[Figure | None, float, str]]:
        """What a slip of a unit would make absurd: far above all that there is."""
        return [
            (self.launch_s, 60.0, "launch_s"),
            (self.bytes_per_s, 1e18, "bytes_per_s"),
            (self.memory_bytes, 1e18, "memory_bytes"),
            (self.disk.read_bytes_per_s if self.disk else None, 1e18, "a disk's read_bytes_per_s"),
            (self.disk.write_bytes_per_s if self.disk else None, 1e18, "a disk's write_bytes_per_s"),
            (self.price_per_hour, 1e9, "price_per_hour"),
            (self.watts, 1e9, "watts"),
            *((rate, 1e21, f"flops in {dtype}") for dtype, rate in self.flops.items()),
        ]

    @property
    def host(self) -> str:
        return self.name.partition("/")[0]


class Link(Value, frozen=True, kw_only=True):
    """A path between two devices or hosts (`a` and `b`, either way round).

    Links that name the same `bus` share its rate. A link from a host to itself serves the pairs of
    devices inside it that have no link of their own. `reduce_curve`, where measured, is what a round of a
    ring all-reduce takes to pass bytes on and add them; a plain message (`curve`) does not add. `kind` says
    what the link is, "PCIe 4.0 x16".
    """

    a: str
    b: str
    curve: Curve
    reduce_curve: Curve | None = None
    bus: str | None = None
    kind: str = ""


class TriedSum(Value, frozen=True, kw_only=True):
    """Seconds by bytes of one way of summing over `devices`, as tried; `way` is an exchange, spelled."""

    devices: tuple[str, ...]
    way: str
    curve: Curve


class Fleet(Value, frozen=True, kw_only=True, dict=True):
    """All devices and links of a job; device names are unique and every link has known ends.

    `hosts` are CPUs that take no samples: their memory holds tables, and their bandwidth moves rows. `sums`
    are those that were tried on these links.
    """

    devices: tuple[Device, ...]
    links: tuple[Link, ...] = ()
    hosts: tuple[Device, ...] = ()
    sums: tuple[TriedSum, ...] = ()
    note: str = ""
    version: int = 1

    def __post_init__(self) -> None:
        if not self.devices:
            raise ValueError("a fleet needs at least one device")
        names = [d.name for d in self.devices]
        twice = sorted(n for n, times in Counter(names).items() if times > 1)
        if twice:
            raise ValueError(f"device names must be unique, twice: {', '.join(twice)}")
        ends = set(names) | {d.host for d in self.devices} | {d.name for d in self.hosts}
        for link in self.links:
            for end in (link.a, link.b):
                if end not in ends:
                    raise ValueError(
                        f"link {link.a} - {link.b} names {end!r}, which is no device or host of "
                        f"the fleet ({', '.join(sorted(ends))})"
                    )

    def device(self, name: str) -> Device:
        """The device called `name`; UnknownNameError lists the names there are."""
        if name in self._by_name:
            return self._by_name[name]
        raise UnknownNameError(
            f"no device {name!r} in the fleet",
            remedy=f"one of: {', '.join(d.name for d in self.devices)}",
        )

    def link(self, a: str, b: str) -> Link | None:
        """The link that serves devices `a` and `b`: their own, else that of their hosts, else None."""
        hosts = frozenset((self.device(a).host, self.device(b).host))
        return self._by_ends.get(frozenset((a, b))) or self._by_ends.get(hosts)

    def tried_sum(self, way: str) -> Curve | None:
        """Seconds by bytes of a way of summing that was tried on these links."""
        return next((s.curve for s in self.sums if s.way == way), None)

    def host_link(self, name: str) -> Link | None:
        """The link between device `name` and its host: their own, else that inside the host, else None."""
        host = self.device(name).host
        return self._by_ends.get(frozenset((name, host))) or self._by_ends.get(frozenset((host,)))

    def host_cpu(self, host: str) -> Device | None:
        """The CPU of `host` where the fleet names just one, whether it takes samples or not."""
        found = [d for d in (*self.devices, *self.hosts) if d.host == host and d.type == "cpu"]
        return found[0] if len(found) == 1 else None

    def as_rehearsed(self) -> "Fleet":
        """The same fleet, its accelerators of the type that a rehearsal gives them."""
        devices = tuple(
            d if d.type == "cpu" else replace(d, type=REHEARSED, index=None) for d in self.devices
        )
        return replace(self, devices=devices)

    @cached_property
    def _by_name(self) -> dict[str, Device]:
        return {d.name: d for d in self.devices}

    @cached_property
    def _by_ends(self) -> dict[frozenset[str], Link]:
        return {frozenset((link.a, link.b)): link for link in reversed(self.links)}

    def only(self, names: tuple[str, ...]) -> "Fleet":
        """The same fleet with just the named devices, and the links whose ends remain."""
        devices = tuple(self.device(n) for n in names)
        ends = set(names) | {d.host for d in devices}
        links = tuple(x for x in self.links if x.a in ends and x.b in ends)
        hosts = tuple(h for h in self.hosts if h.host in ends and h.name not in names)
        sums = tuple(s for s in self.sums if set(s.devices) <= set(names))
        return replace(self, devices=devices, links=links, hosts=hosts, sums=sums)

    def joined_by(self, other: "Fleet") -> "Fleet":
        """The same fleet and the devices, hosts and links of `other` that it lacks."""
        known = {d.name for d in (*self.devices, *self.hosts)}
        return replace(
            self,
            devices=(*self.devices, *(d for d in other.devices if d.name not in known)),
            hosts=(*self.hosts, *(h for h in other.hosts if h.name not in known)),
            links=(*self.links, *(x for x in other.links if x not in self.links)),
        )

    def with_hosts(self, others: tuple[Device, ...]) -> "Fleet":
        """The same fleet, which knows of the CPUs among `others` whose hosts it has accelerators of."""
        wanted = {d.host for d in self.devices if d.type != "cpu"}
        known = {d.name for d in self.devices}
        hosts = tuple(d for d in others if d.type == "cpu" and d.host in wanted and d.name not in known)
        return replace(self, hosts=hosts)


def unlike_kinds(fleet: Fleet) -> list[str]:
    """Sentences on devices that share a kind but not what sets their seconds; profiles are kept by kind.

    Compared are `flops`, `bytes_per_s`, `launch_s` and `rehearsed`, each with the first device of the kind;
    spreads do not count. Example: a/0 at 8e9 and a/1 at 2e9 FLOP/s of one kind "k" give
    ["a/0 and a/1 are both of kind 'k': flops float32 8e+09 and 2e+09"].
    """
    first: dict[str, Device] = {}
    said = []
    for device in fleet.devices:
        other = first.setdefault(device.kind, device)
        ours, theirs = _pace(other), _pace(device)
        names = [n for n in dict.fromkeys((*ours, *theirs)) if ours.get(n) != theirs.get(n)]
        if names:
            told = ", ".join(f"{n} {_number(ours.get(n))} and {_number(theirs.get(n))}" for n in names)
            said.append(f"{other.name} and {device.name} are both of kind {device.kind!r}: {told}")
    return said


def _pace(device: Device) -> dict[str, float]:
    """Every number that sets how long an operation takes, by a name to print."""
    numbers = {f"flops {dtype}": figure.value for dtype, figure in device.flops.items()}
    for field in ("bytes_per_s", "launch_s"):
        figure = getattr(device, field)
        if figure is not None:
            numbers[field] = figure.value
    factors = device.rehearsed.factors if device.rehearsed else {}
    return numbers | {f"factor of {family}": factor for family, factor in factors.items() if factor != 1}


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.6g}"
