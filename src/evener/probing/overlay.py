"""Laying what torch sees over what the host has, so that each device is told once."""

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from evener.core.host import Card
from evener.probing.cards import bus

VENDOR = {"xpu": "intel", "mps": "apple"}


def overlay(known: Sequence[Card], on_bus: Sequence[Card]) -> list[Card]:
    """`known` cards with what only the bus tells of them, then those on the bus that nobody else knows."""
    by_address = {c.bus_id: c for c in on_bus}
    found = []
    for card in known:
        there = by_address.pop(card.bus_id, None)
        node = card.numa_node if card.numa_node is not None else there.numa_node if there else None
        found.append(replace(card, numa_node=node))
    return found + list(by_address.values())


def with_torch(
    cards: Sequence[Card], devices: Sequence[dict[str, Any]], rates: Sequence[dict[str, Any]], *, hip: bool
) -> list[Card]:
    """`cards` with torch's index and measured rates where torch sees them; what only torch sees is added.

    A device is recognised by its id, else by its address, else by its name among the cards that are left.
    """
    measured = {r.get("index"): r for r in rates}
    found = list(cards)
    for device in devices:
        vendor = VENDOR.get(device.get("type", ""), "amd" if hip else "nvidia")
        place = _place(found, device, vendor)
        told = measured.get(device.get("index"), {})
        fields: dict[str, Any] = {
            "torch_index": device.get("index"),
            "dtypes": told.get("rates", {}),
            "dtype_errors": told.get("errors", {}),
        }
        if place is None:
            known = {k: device.get(k) for k in ("arch", "memory_bytes", "integrated") if device.get(k)}
            kind = device.get("name") or f"{device.get('type', 'device')} of {vendor}"
            told = {"kind": kind, "vendor": vendor, "bus_id": device.get("bus_id", "")}
            found.append(msgspec.convert({**told, **known, **fields}, Card))
            continue
        card = found[place]
        fields["arch"] = card.arch or device.get("arch", "")
        fields["integrated"] = card.integrated or device.get("integrated")
        fields["memory_bytes"] = card.memory_bytes or device.get("memory_bytes")
        if ":" in card.kind and device.get("name"):
            fields["kind"] = device["name"]  # the bus knows only numbers
        found[place] = replace(card, **fields)
    return found


def _place(cards: Sequence[Card], device: dict[str, Any], vendor: str) -> int | None:
    """Where in `cards` a device of torch's is; None where it is nowhere."""
    left = [i for i, c in enumerate(cards) if c.vendor == vendor and c.torch_index is None]
    whole = {c.parent for c in cards if c.mig and c.parent}
    left = [i for i in left if cards[i].hardware_id not in whole or not whole]
    uuid = device.get("uuid", "")
    by_id = [i for i in left if uuid and cards[i].hardware_id.endswith(uuid)]
    by_bus = [i for i in left if device.get("bus_id") and cards[i].bus_id == bus(device["bus_id"])]
    by_name = [i for i in left if device.get("name") and cards[i].kind == device["name"]]
    parts = [i for i in left if cards[i].parent and "MIG" in device.get("name", "")]
    return next(iter(by_id or by_bus or by_name or parts), None)
