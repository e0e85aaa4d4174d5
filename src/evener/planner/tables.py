"""Where embedding tables go: dense on every device, or in parts by budget, and why."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from dataclasses import replace as replaced

from msgspec.structs import replace

from evener.core.collectives import ring
from evener.core.figures import Curve, Figure, line
from evener.core.fleet import Device, Fleet
from evener.core.plan import TablePlacement
from evener.core.split import apportion
from evener.core.tables import TableSite, TableUse
from evener.core.words import in_bytes
from evener.cost.tables import TablePrice, dense, looked_up
from evener.errors import NoPlanFitsError

HOST_RATE = Figure(value=10e9, source="assumed", note="one core's copies of rows at random")
DEVICE_RATE = Figure(value=200e9, source="assumed", note="a small accelerator's memory")
LINK = line(1e-4, 1e9)  # between devices, where none is known (assumed)
BUDGET_PART = 0.75  # of free memory that tables may take, beside the model's parameters and data
DENSE, CPU, DEVICE = "dense", "cpu", "device"
BUS_BOUND = "; bus is all copies, at most: what rows sent ahead hide of it is no part of the step"
_WORDS = {CPU: "looked up in host memory", DEVICE: "looked up in the devices' memory"}


@dataclass(frozen=True, kw_only=True)
class TableChoice:
    """The placement (its `why` is the sentence), and what it costs a step."""

    placement: TablePlacement
    price: TablePrice

    @property
    def why(self) -> str:
        """The sentence with the sum."""
        return self.placement.why


@dataclass(frozen=True)
class _Way:
    """One place: the price, rows by device (None: no room), and the bytes that each device would give."""

    residence: str
    price: TablePrice
    rows: dict[str, int] | None
    room: Mapping[str, int]


def table_sites(
    fleet: Fleet, devices: Sequence[str], *, beside_bytes: int = 0, rate: Figure | None = None
) -> tuple[TableSite, ...]:
    """What each device of a job can give to tables.

    Three quarters of its free memory less what the framework and `beside_bytes` (the rest of the model, with
    gradients and optimiser) take there; a host's memory is shared by its processes in equal parts. `rate` is
    that of rows at random in host memory, where no file tells a CPU's.
    Example: 8 GB free, 1 GB of framework and 1 GB of model leave 4.5 GB.
    """
    found = [fleet.device(name) for name in devices]
    sites = []
    for d in found:
        cpu = d if d.type == "cpu" else fleet.host_cpu(d.host)
        accelerated = d.type != "cpu"
        # CPUs of a fleet file have memory of their own, unless they are one: then they share it.
        sharing = [
            x
            for x in found
            if x.host == d.host
            and (accelerated or x is d or (x.hardware_id and x.hardware_id == d.hardware_id))
        ]
        beside = beside_bytes if d.type == "cpu" else 0
        host = _budget(cpu, beside * len(sharing)) if cpu else None
        link = fleet.host_link(d.name) if accelerated else None
        sites.append(
            TableSite(
                device=d.name,
                host_bytes=None if host is None else host // len(sharing),
                device_bytes=_budget(d, beside_bytes) if accelerated else None,
                host_rate=(cpu.bytes_per_s if cpu and cpu.bytes_per_s else None) or rate or HOST_RATE,
                device_rate=(d.bytes_per_s or DEVICE_RATE) if accelerated else None,
                bus=link.curve if link else None,
            )
        )
    return tuple(sites)


def place_tables(
    uses: Sequence[TableUse],
    fleet: Fleet,
    sites: Sequence[TableSite],
    samples: int,
    *,
    only: Mapping[str, str] | None = None,
) -> tuple[TableChoice, ...]:
    """The cheapest place of each table for steps of `samples` samples, in the order of `uses`.

    The largest chooses first and the others have what it leaves. `only` fixes the residence of tables by
    name. Raises NoPlanFitsError, with the sum, for a table that fits nowhere.
    """
    known = ring(fleet, [s.device for s in sites])
    hops = [hop or LINK for hop in known] if len(known) > 1 else known
    taken: dict[str, int] = {}
    chosen: dict[str, TableChoice] = {}
    for use in sorted(uses, key=lambda u: -u.held_bytes):
        try:
            choice = place_table(use, hops, sites, samples, only=(only or {}).get(use.name))
        except NoPlanFitsError as e:
            beside = "".join(f"; {n} took {in_bytes(b)} before" for n, b in taken.items())
            raise NoPlanFitsError(e.what, numbers=e.numbers + beside, remedy=e.remedy) from None
        if len(known) > 1 and None in known:
            placed = choice.placement
            choice = replaced(
                choice, placement=replace(placed, why=f"{placed.why}; links at 1 GB/s (assumed)")
            )
        chosen[use.name] = choice
        taken[use.name] = sum(choice.placement.held_bytes.values())
        sites = [_without(site, choice.placement) for site in sites]
    return tuple(chosen[use.name] for use in uses)


def place_table(
    use: TableUse,
    hops: Sequence[Curve | None],
    sites: Sequence[TableSite],
    samples: int,
    *,
    only: str | None = None,
) -> TableChoice:
    """The cheapest place of one table; `hops` are the ring's over the devices of `sites`.

    Dense on all devices competes with rows looked up in host memory, and in the devices' own, in parts by
    budget. NoPlanFitsError, with the sum, where the table fits in none of them.
    Example: 2 million rows of 64 on one CPU of 10 GB/s: 0.4 ms looked up, 205 ms dense.
    """
    ways = _ways(use, hops, sites, samples)
    fitting = [w for w in ways if w.rows is not None and only in (None, w.residence)]
    if not fitting:
        largest = max(ways, key=lambda w: sum(w.room.values()) if w.residence != DENSE else -1)
        told = "with its optimiser's state"
        host = next(w.room for w in ways if w.residence == CPU)
        raise too_large(use.name, use.num_rows, use.held_bytes, told, largest.room, host)
    best = min(fitting, key=lambda w: w.price.total_s)
    rows = best.rows or {}
    each = best.price.held_bytes / use.num_rows
    words = [_words(w) for w in sorted(ways, key=lambda w: (w is not best, w.price.total_s))]
    rate = min((s.host_rate for s in sites), key=lambda r: r.value)  # the one that is reckoned with
    why = (
        f"table {use.name}: {use.touched(samples):.0f} of {use.num_rows} rows a step ({use.source}), "
        f"{'; '.join(words)}; host memory at {rate.value / 1e9:.3g} GB/s ({rate.source})"
        f"{BUS_BOUND if best.price.transfer_s else ''}"
    )
    placed = TablePlacement(
        table=use.name,
        rows=rows,
        residence=best.residence,
        held_bytes={d: round(n * each) for d, n in rows.items()},
        why=why,
    )
    return TableChoice(placement=placed, price=best.price)


def too_large(
    table: str,
    num_rows: int,
    num_bytes: float,
    of_what: str,
    room: Mapping[str, float],
    host: Mapping[str, float],
) -> NoPlanFitsError:
    """The error for `table`, of `num_rows` rows and `num_bytes` bytes, where `room` by device is less in all.

    `host` is the room in host memory by device, as far as it is known: there a tiered table has its cache.
    Example: 100 rows of 800 bytes in room for 2 kB and 6 kB: 10 rows fit, or 2 a device beside a file.
    """
    each = num_bytes / num_rows
    fit, cached = int(sum(room.values()) / each), int(min(host.values(), default=0) / each)
    fewer = f"at most {fit} rows instead of {num_rows}" if fit else "fewer rows"
    return NoPlanFitsError(
        f"the table {table} is larger than all memory that it may take together",
        numbers=f"{in_bytes(num_bytes)} {of_what}; "
        + ", ".join(f"{n} {in_bytes(b)}" for n, b in room.items())
        + f": {in_bytes(sum(room.values()))} in all",
        remedy=f'a tiered table: place={{"{table}": {{"file": FOLDER, "rows": {cached or "N"}}}}}, so many '
        f"rows or fewer in a device's host memory; {fewer}; another device",
    )


def no_device_holds(use: TableUse, fleet: Fleet) -> bool:
    """Whether the table, dense with gradients and state, is beyond every device whose memory is known.

    Then it is placed without being asked for: there is no other way to train it. With one device whose memory
    nobody knows it is left where it is.
    """
    needed = use.held_bytes + use.num_rows * use.row_bytes
    rooms = [d.free_memory_bytes or d.memory_bytes for d in fleet.devices]
    return all(room is not None and room.value < needed for room in rooms)


def _ways(
    use: TableUse, hops: Sequence[Curve | None], sites: Sequence[TableSite], samples: int
) -> list[_Way]:
    devices = [s.device for s in sites]
    accelerated = [s for s in sites if s.is_accelerator]
    host_rate = min(s.host_rate.value for s in sites)
    own_rate = min(s.own_rate.value for s in sites)
    touched_bytes = use.touched(samples) * use.row_bytes
    bus = max((s.bus for s in accelerated if s.bus), key=lambda b: b.seconds(touched_bytes), default=None)
    host = {s.device: s.host_bytes for s in sites if s.host_bytes is not None}
    price = looked_up(use, samples, memory_bytes_per_s=host_rate, bus=bus, hops=hops)
    ways = [_Way(CPU, price, _parts(use, devices, host), host)]
    if accelerated:
        own = {s.device: s.device_bytes for s in accelerated if s.device_bytes is not None}
        rate = min(s.own_rate.value for s in accelerated)
        price = looked_up(use, samples, memory_bytes_per_s=rate, bus=bus, hops=hops, trips=4)
        ways.append(_Way(DEVICE, price, _parts(use, [s.device for s in accelerated], own), own))
    room = {s.device: s.own_bytes for s in sites if s.own_bytes is not None}
    price = dense(use, memory_bytes_per_s=own_rate, hops=hops)
    fits = all(price.held_bytes <= b for b in room.values())
    ways.append(_Way(DENSE, price, dict.fromkeys(devices, use.num_rows) if fits else None, room))
    return ways


def _words(way: _Way) -> str:
    price = way.price
    parts = (("memory", price.memory_s), ("bus", price.transfer_s), ("other devices", price.exchange_s))
    told = " + ".join(f"{name} {s * 1e3:.3g}" for name, s in parts if s)
    where = _WORDS.get(way.residence, "with dense gradients on every device")
    note = ", which does not fit" if way.rows is None else ""
    return f"{price.total_s * 1e3:.3g} ms {where} ({told}; {price.held_bytes / 2**20:.4g} MiB{note})"


def _parts(use: TableUse, devices: Sequence[str], room: Mapping[str, int]) -> dict[str, int] | None:
    """Rows by device in proportion to budgets, equal where one is not known; None where they do not fit."""
    weights = [float(room[d]) if len(room) == len(devices) else 1.0 for d in devices]
    if not sum(weights):
        return None
    rows = dict(zip(devices, apportion(use.num_rows, weights), strict=True))
    row_bytes = use.held_bytes / use.num_rows
    return rows if all(rows[d] * row_bytes <= room[d] + row_bytes for d in rows if d in room) else None


def _budget(device: Device, beside_bytes: int) -> int | None:
    memory = device.free_memory_bytes or device.memory_bytes
    if memory is None:
        return None
    framework = device.framework_bytes.value if device.framework_bytes else 0.0
    return max(0, int((memory.value - framework - beside_bytes) * BUDGET_PART))


def _without(site: TableSite, placed: TablePlacement) -> TableSite:
    """What a placed table leaves of a site."""
    num_bytes = placed.held_bytes.get(site.device, 0)
    if placed.residence == CPU or not site.is_accelerator:
        left = None if site.host_bytes is None else max(0, site.host_bytes - num_bytes)
        return replace(site, host_bytes=left)
    left = None if site.device_bytes is None else max(0, site.device_bytes - num_bytes)
    return replace(site, device_bytes=left)
