"""Published figures of common devices and links, for what was not measured. The data is catalogue.json.

    {"name": "lab1/gpu0", "kind": "NVIDIA GeForce RTX 3060"}      a device by its kind alone
    {"a": "lab1", "b": "lab2", "kind": "10 Gbit/s Ethernet"}      a link by its name alone

Names count as a whole, in any case of letters; other spellings are aliases that the data lists. Nothing is
guessed from a part of a name.
"""

import difflib
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import msgspec
from msgspec.structs import replace

from evener.core.figures import Curve, Figure, Value, line
from evener.core.files import read
from evener.core.fleet import Device, Fleet, Link, Rehearsed
from evener.errors import FileError, UnknownNameError

_DATA = Path(__file__).with_name("catalogue.json")
_GIB = 2.0**30
LAUNCH_S = {"cpu": 5e-6}
"""Fixed cost of one operation by type of device, seconds (assumed); `LAUNCH_ELSEWHERE_S` for all others."""
LAUNCH_ELSEWHERE_S = 1e-5
FRAMEWORK_BYTES = {"cpu": 0.3 * _GIB, "mps": 0.3 * _GIB}
"""What the framework holds by type of device (assumed); `FRAMEWORK_ELSEWHERE_BYTES` for all others."""
FRAMEWORK_ELSEWHERE_BYTES = 0.75 * _GIB


class KnownDevice(Value, frozen=True, kw_only=True):
    """A kind of device as its maker's sheet describes it; what the sheet does not say is absent.

    `tflops` are dense rates of matrix products in 10^12 FLOP/s, `memory_gb` and `gb_per_s` count in 10^9. All
    are as printed in `sheet`, but for those that `derived` explains. `cores` of a CPU: fewer threads get
    their part.
    """

    kind: str
    type: str
    sheet: str
    aliases: tuple[str, ...] = ()
    memory_gb: float | None = None
    gb_per_s: float | None = None
    tflops: dict[str, float]
    watts: float | None = None
    cores: int | None = None
    derived: dict[str, str] = {}
    note: str = ""

    def figure(self, name: str, value: float) -> Figure:
        """`value` with where it comes from."""
        how = self.derived.get(name)
        return Figure(value=value, source="table", note=f"{self.sheet}: {how}" if how else self.sheet)


class KnownLink(Value, frozen=True, kw_only=True):
    """A kind of link: its published rate one way (`gb_per_s` in 10^9 bytes), and two assumptions.

    `reaches` is the part of that rate that messages are assumed to get, `latency_s` what one costs at least.
    """

    name: str
    gb_per_s: float
    sheet: str
    reaches: float
    latency_s: float
    aliases: tuple[str, ...] = ()
    note: str = ""

    @property
    def curve(self) -> Curve:
        """latency + bytes / (rate · reaches). Example: 1 Gbit/s Ethernet moves 1 MB in 0.1 + 8.9 = 9 ms."""
        return line(self.latency_s, self.gb_per_s * 1e9 * self.reaches, source="table")


class Catalogue(Value, frozen=True, kw_only=True):
    """All that is in catalogue.json."""

    devices: tuple[KnownDevice, ...]
    links: tuple[KnownLink, ...]


@cache
def catalogue() -> Catalogue:
    """The catalogue, read once."""
    return msgspec.json.decode(_DATA.read_bytes(), type=Catalogue)


@cache
def _devices() -> dict[str, KnownDevice]:
    return {name.casefold(): d for d in catalogue().devices for name in (d.kind, *d.aliases)}


@cache
def _links() -> dict[str, KnownLink]:
    return {name.casefold(): x for x in catalogue().links for name in (x.name, *x.aliases)}


def known_device(kind: str) -> KnownDevice | None:
    """The entry of a kind or alias, whole name, any case; None where there is none."""
    return _devices().get(kind.casefold())


def near_kinds(kind: str, more: Sequence[str] = ()) -> tuple[str, ...]:
    """Up to five kinds of the catalogue, and of `more`, whose names are most like `kind`."""
    names = {n: d.kind for n, d in _devices().items()} | {n.casefold(): n for n in more}
    return _near(kind, names)


def check_known(devices: Sequence[Device]) -> None:
    """UnknownNameError naming the first device without any rate, whose kind the catalogue does not hold.

    To pace such a device there is nothing to go by.
    """
    for device in devices:
        if not device.flops and device.bytes_per_s is None and known_device(device.kind) is None:
            raise UnknownNameError(
                f"{device.name} has no figures, and the catalogue holds no kind {device.kind!r}",
                numbers=f"names like it: {', '.join(near_kinds(device.kind)) or 'none'}",
                remedy="one of those kinds, or flops, bytes_per_s and memory_bytes in the fleet file",
            )


def link_curve(name: str, where: str) -> Curve:
    """The curve of the link called `name`; UnknownNameError, with `where`, lists the names most like it."""
    found = _links().get(name.casefold())
    if found is None:
        near = _near(name, {n: x.name for n, x in _links().items()})
        raise UnknownNameError(
            f"{where}: no link is called {name!r}",
            remedy=f"one of: {', '.join(near)}; or a curve of [bytes, seconds] points",
        )
    return found.curve


def _near(name: str, names: dict[str, str]) -> tuple[str, ...]:
    close = difflib.get_close_matches(name.casefold(), names, n=10, cutoff=0.3)
    return tuple(dict.fromkeys(names[n] for n in close))[:5]


def with_table(device: Device) -> Device:
    """`device` with the catalogue's figures for what it lacks, unless anything about it was measured.

    Fixed costs that no sheet gives (an operation's launch, the framework's memory) are assumed then, by type.
    A CPU with fewer `threads` than the sheet has cores gets that part of the rate. A kind that the catalogue
    does not hold leaves the device as it is.
    """
    given = (device.memory_bytes, device.free_memory_bytes, device.bytes_per_s, *device.flops.values())
    known = known_device(device.kind)
    if known is None or any(f is not None and f.source in ("measured", "fitted") for f in given):
        return device
    part = 1.0 if not (known.cores and device.threads) else min(1.0, device.threads / known.cores)
    rates = {t: known.figure(t, x * 1e12 * part) for t, x in known.tflops.items()}
    memory = known.figure("memory_gb", known.memory_gb * 1e9) if known.memory_gb else None
    bandwidth = known.figure("gb_per_s", known.gb_per_s * 1e9) if known.gb_per_s else None
    watts = known.figure("watts", known.watts) if known.watts else None
    launch = LAUNCH_S.get(known.type, LAUNCH_ELSEWHERE_S)
    held = FRAMEWORK_BYTES.get(known.type, FRAMEWORK_ELSEWHERE_BYTES)
    return replace(
        device,
        type=device.type if device.type != "cpu" else known.type,
        memory_bytes=device.memory_bytes or memory,
        framework_bytes=device.framework_bytes or _assumed(held, known.type, "the framework's memory"),
        flops=device.flops or rates,
        bytes_per_s=device.bytes_per_s or bandwidth,
        launch_s=device.launch_s or _assumed(launch, known.type, "an operation's launch"),
        watts=device.watts or watts,
    )


def _assumed(value: float, type_: str, what: str) -> Figure:
    return Figure(value=value, source="assumed", note=f"{what} on any {type_} device")


class FleetLine(Value, frozen=True, kw_only=True):
    """A link as a file may write it: by its curve, or by the name of a kind in the catalogue."""

    a: str
    b: str
    kind: str = ""
    curve: Curve | None = None
    reduce_curve: Curve | None = None
    bus: str | None = None


MOST_SCALED = 1e6  # a card of 80 GB becomes one of 80 kB


class Scale(Value, frozen=True, kw_only=True):
    """A fleet to rehearse in the ratios of a real one: everything so many times slower, or smaller.

    `slower` divides the rates of devices and links and multiplies latencies; `smaller` divides memory. What
    one operation costs at least is the host's doing and stays.
    """

    slower: float = 1.0
    smaller: float = 1.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not 1 <= getattr(self, name) <= MOST_SCALED:
                raise ValueError(f"{name} must be 1 or more and at most 1e6, got {getattr(self, name):g}")

    def of_device(self, device: Device) -> Device:
        """`device` at this scale; of another kind, since profiles are kept by kind.

        Example: an RTX 3060 1,000 times slower and 100 times smaller does 12.74e9 FLOP/s with 120e6 bytes.
        """

        def divided(figure: Figure | None, times: float) -> Figure | None:
            if figure is None:
                return None
            return replace(figure, value=figure.value / times, note=f"{figure.note} ÷ {times:g}".strip())

        parts = [
            f"{times:g} times {word}"
            for times, word in ((self.slower, "slower"), (self.smaller, "smaller"))
            if times > 1
        ]
        disk = device.disk
        if disk:
            rates = {
                n: divided(getattr(disk, n), self.slower) for n in ("read_bytes_per_s", "write_bytes_per_s")
            }
            disk = replace(disk, **rates, free_bytes=divided(disk.free_bytes, self.smaller))
        return replace(
            device,
            kind=", ".join([device.kind, *parts]),
            flops={dtype: divided(f, self.slower) for dtype, f in device.flops.items()},
            bytes_per_s=divided(device.bytes_per_s, self.slower),
            disk=disk,
            memory_bytes=divided(device.memory_bytes, self.smaller),
            free_memory_bytes=divided(device.free_memory_bytes, self.smaller),
            framework_bytes=divided(device.framework_bytes, self.smaller),
            rehearsed=replace(device.rehearsed or Rehearsed(), smaller=self.smaller),
        )

    def of_curve(self, curve: Curve) -> Curve:
        """`curve` with all its seconds `slower` times as long. Example: 1 ms becomes 1 s at 1,000."""
        points = tuple((num_bytes, seconds * self.slower) for num_bytes, seconds in curve.points)
        return replace(curve, points=points)


class FleetFile(Value, frozen=True, kw_only=True):
    """A fleet as a file may write it, see `read_fleet`."""

    devices: tuple[Device, ...]
    links: tuple[FleetLine, ...] = ()
    hosts: tuple[Device, ...] = ()
    scaled: Scale | None = None
    note: str = ""
    version: int = 1


def read_fleet(path: str | Path) -> Fleet:
    """The fleet in the file at `path`, with the catalogue's figures where nothing was measured.

    Raises FileError naming the place in the file, UnknownNameError for a link whose kind is unknown.
    """
    return resolved(read(path, FleetFile), str(path))


def resolved(file: FleetFile, where: str) -> Fleet:
    """`file` as a fleet: kinds of links become curves, kinds of devices figures; `where` names it in errors.

    Example: a device of kind "A100-80" and nothing else gets 80e9 bytes, 19.5e12 FLOP/s in float32 and 312e12
    in bfloat16, all of source "table". With `scaled` all of that is divided, see `Scale`.
    """
    links = []
    for x in file.links:
        place = f"{where}: link {x.a} - {x.b}"
        if x.curve is None and not x.kind:
            raise FileError(
                f"{place} has neither a curve nor a kind",
                remedy='"kind": "1 Gbit/s Ethernet", or "curve": {"points": [[bytes, seconds], ...], ...}',
            )
        curve = x.curve or link_curve(x.kind, place)
        scale = file.scaled or Scale()
        summing = scale.of_curve(x.reduce_curve) if x.reduce_curve else None
        curve = scale.of_curve(curve)
        links.append(Link(a=x.a, b=x.b, kind=x.kind, curve=curve, reduce_curve=summing, bus=x.bus))

    def told(listed: tuple[Device, ...]) -> tuple[Device, ...]:
        found = [with_table(d) for d in listed]
        return tuple(file.scaled.of_device(d) if file.scaled else d for d in found)

    try:
        return Fleet(
            devices=told(file.devices),
            hosts=told(file.hosts),
            links=tuple(links),
            note=file.note,
            version=file.version,
        )
    except ValueError as e:
        raise FileError(f"{where} is no valid fleet file: {e}", remedy="names that agree") from e
