"""Where an embedding table goes: on every device, in host memory in parts by budget, or nowhere, and why."""

from collections.abc import Mapping
from dataclasses import dataclass

from evener.core.collectives import ring
from evener.core.fleet import Device, Fleet
from evener.core.plan import TablePlacement
from evener.core.split import apportion
from evener.core.tables import TableUse
from evener.cost.tables import TablePrice, dense, looked_up
from evener.errors import NoPlanFitsError

MEMORY_BYTES_PER_S = 10e9  # of a host nobody measured: one core's copies of rows at random
BUDGET_PART = 0.5  # of a device's memory that its tables may take, beside model and data


@dataclass(frozen=True, kw_only=True)
class TableChoice:
    """The placement, what it costs a step, and the sentence why."""

    placement: TablePlacement
    price: TablePrice
    why: str


def place_table(
    use: TableUse,
    fleet: Fleet,
    devices: tuple[str, ...],
    samples: int,
    budgets: Mapping[str, int] | None = None,
) -> TableChoice:
    """The cheapest place of a table for steps of `samples` samples; `budgets` are bytes by device.

    Without budgets a device gives half of its free memory. Dense on all devices competes with rows looked up
    in host memory, in parts by budget. NoPlanFitsError, with the sum, where the table fits neither way.
    Example: 2 million rows of 64 on one CPU of 10 GB/s: 0.4 ms looked up, 205 ms dense.
    """
    found = [fleet.device(name) for name in devices]
    room = {d.name: _budget(d) if budgets is None else budgets.get(d.name) for d in found}
    hops = ring(fleet, devices)
    rate = min(d.bytes_per_s.value if d.bytes_per_s else MEMORY_BYTES_PER_S for d in found)
    rows = looked_up(use, samples, memory_bytes_per_s=rate, bus=None, hops=hops)
    whole = dense(use, memory_bytes_per_s=rate, hops=hops)
    known = {name: bytes_ for name, bytes_ in room.items() if bytes_ is not None}
    parts = _parts(use, devices, known)
    fits_whole = all(whole.held_bytes <= b for b in known.values())
    if parts is None and not fits_whole:
        raise too_large(use.name, use.held_bytes, "with its optimiser's state", known)
    if fits_whole and (parts is None or whole.total_s < rows.total_s):
        why = f"{_seconds(whole)} a step dense on every device, {_seconds(rows)} looked up in host memory"
        placed = TablePlacement(table=use.name, rows=dict.fromkeys(devices, use.num_rows), residence="dense")
        return TableChoice(placement=placed, price=whole, why=f"table {use.name}: {why}")
    assert parts is not None
    against = f"{_seconds(whole)} with dense gradients on every device"
    if not fits_whole:
        against += ", which does not fit"
    return TableChoice(
        placement=TablePlacement(table=use.name, rows=parts, residence="cpu"),
        price=rows,
        why=f"table {use.name}: {use.touched(samples):.0f} of {use.num_rows} rows a step, {_seconds(rows)} "
        f"looked up in host memory; {against}",
    )


def too_large(table: str, num_bytes: float, of_what: str, room: Mapping[str, float]) -> NoPlanFitsError:
    """The error for `table`, of `num_bytes` bytes, where `room` by device is less in all."""
    return NoPlanFitsError(
        f"the table {table} is larger than all memory that it may take together",
        numbers=f"{num_bytes / 2**30:.3g} GiB {of_what}; "
        + ", ".join(f"{n} {b / 2**30:.3g}" for n, b in room.items())
        + f": {sum(room.values()) / 2**30:.3g} GiB",
        remedy='a tiered table: place={"NAME": {"file": FOLDER, "rows": N}}; fewer rows, another device',
    )


def _parts(use: TableUse, devices: tuple[str, ...], room: Mapping[str, int]) -> dict[str, int] | None:
    """Rows by device in proportion to budgets, equal where none is known; None where they do not fit."""
    weights = [float(room[d]) if len(room) == len(devices) else 1.0 for d in devices]
    if not sum(weights):
        return None
    rows = dict(zip(devices, apportion(use.num_rows, weights), strict=True))
    row_bytes = use.held_bytes / use.num_rows
    return rows if all(rows[d] * row_bytes <= room[d] + row_bytes for d in room) else None


def _budget(device: Device) -> int | None:
    memory = device.free_memory_bytes or device.memory_bytes
    return None if memory is None else int(memory.value * BUDGET_PART)


def _seconds(price: TablePrice) -> str:
    return f"{price.total_s * 1e3:.3g} ms"
