"""Which accelerators a host has, from several witnesses: NVML, nvidia-smi, AMD's tables in /sys, the bus.

Each may be silent, so they are laid over each other by the cards' addresses on the bus. Files are read
through `read` and folders through `names`, so that a test can stand for a machine.
"""

import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from evener.core.host import Card
from evener.probing.ask_torch import MARK

Read = Callable[[str], str]
Names = Callable[[str], Sequence[str]]
VENDORS = {"0x10de": "nvidia", "0x1002": "amd"}
DISPLAY_CLASSES = ("0x03", "0x12")
"""PCI classes of displays and of processing accelerators."""
SMI_FIELDS = {
    "index": "smi_index",
    "uuid": "hardware_id",
    "name": "kind",
    "pci.bus_id": "bus_id",
    "compute_cap": "arch",
    "memory.total": "memory_bytes",
    "memory.free": "free_memory_bytes",
    "mig.mode.current": "mig",
    "compute_mode": "compute_mode",
    "clocks.sm": "clock_mhz",
    "clocks.max.sm": "max_clock_mhz",
    "power.limit": "power_limit_w",
    "power.default_limit": "default_power_limit_w",
    "temperature.gpu": "temperature_c",
    "pcie.link.width.current": "pcie_width",
    "pcie.link.width.max": "max_pcie_width",
    "driver_version": "driver",
}
SMI_QUERY = ("nvidia-smi", f"--query-gpu={','.join(SMI_FIELDS)}", "--format=csv,noheader,nounits")
SMI_LIST = ("nvidia-smi", "-L")
MODES = {"Default": "default", "Exclusive_Process": "exclusive", "Prohibited": "prohibited"}
KFD = "/sys/class/kfd/kfd/topology/nodes"
PCI = "/sys/bus/pci/devices"


def lines(text: str) -> list[dict[str, Any]]:
    """What a process of ours told, line by line; all other lines and broken ones are passed over."""
    found = []
    for line in text.splitlines():
        if line.startswith(MARK):
            try:
                told = json.loads(line.removeprefix(MARK))
            except ValueError:
                continue
            if isinstance(told, dict):
                found.append(told)
    return found


def bus(address: str) -> str:
    """A PCI address as Linux writes it. Example: "00000000:3B:00.0" is "0000:3b:00.0"."""
    found = re.fullmatch(
        r"(?:([0-9a-fA-F]+):)?([0-9a-fA-F]{2}):([0-9a-fA-F]{2})(?:\.([0-9a-fA-F]))?", address
    )
    if not found:
        return address
    domain = int(found[1] or "0", 16)
    return f"{domain:04x}:{found[2].lower()}:{found[3].lower()}.{(found[4] or '0').lower()}"


def from_nvml(told: Iterable[dict[str, Any]]) -> tuple[list[Card], list[str]]:
    """The cards that NVML named, and what was wrong with answers that make no card."""
    found, wrong = [], []
    for one in told:
        fields = {k: v for k, v in one.items() if k in Card.__struct_fields__ and v not in (None, "")}
        fields["bus_id"] = bus(str(fields.get("bus_id", "")))
        fields.setdefault("kind", "NVIDIA card that does not answer")
        try:
            found.append(msgspec.convert({"vendor": "nvidia", **fields}, Card))
        except msgspec.ValidationError as e:
            wrong.append(str(e))
    return found, wrong


def from_smi(text: str) -> tuple[list[Card], str]:
    """The cards in nvidia-smi's table, and the driver's version."""
    found, driver = [], ""
    for row in csv.reader(io.StringIO(text), skipinitialspace=True):
        if len(row) != len(SMI_FIELDS):
            continue
        fields: dict[str, Any] = {}
        for name, value in zip(SMI_FIELDS.values(), row, strict=True):
            known = _smi_value(name, value.strip())
            if known is not None:
                fields[name] = known
        driver = fields.pop("driver", driver)
        if fields.get("kind"):
            found.append(Card(vendor="nvidia", **fields))
    return found, driver


def _smi_value(name: str, value: str) -> Any:
    if not value or value.startswith("[") or value in ("N/A", "Unknown Error"):
        return None
    if name in ("kind", "hardware_id", "driver"):
        return value
    if name == "bus_id":
        return bus(value)
    if name == "arch":
        return "sm_" + value.replace(".", "")
    if name == "mig":
        return value == "Enabled"
    if name == "compute_mode":
        return MODES.get(value)
    try:
        number = float(value)
    except ValueError:
        return None
    if name.endswith("_bytes"):
        return int(number) * 2**20
    return int(number) if name in ("smi_index", "pcie_width", "max_pcie_width") else number


def slices_from_smi(text: str, cards: Sequence[Card]) -> list[Card]:
    """The slices that `nvidia-smi -L` lists below their cards."""
    found: list[Card] = []
    parent: Card | None = None
    for line in text.splitlines():
        if whole := re.match(r"GPU \d+: .*\(UUID: (GPU-[^)]+)\)", line):
            parent = next((c for c in cards if c.hardware_id == whole[1]), None)
        part = re.match(r"\s+(MIG \S+)\s+Device\s+\d+: \(UUID: (MIG-[^)]+)\)", line)
        if part and parent:
            kind = f"{parent.kind} {part[1]}"
            found.append(
                Card(
                    kind=kind,
                    vendor="nvidia",
                    hardware_id=part[2],
                    arch=parent.arch,
                    parent=parent.hardware_id,
                    mig=True,
                )
            )
    return found


def from_kfd(read: Read, names: Names) -> list[Card]:
    """The AMD devices in the kernel's own table: each die of a card is one."""
    found: list[Card] = []
    for node in sorted(names(KFD), key=lambda n: int(n) if n.isdigit() else 0):
        told = dict(
            line.split(None, 1) for line in read(f"{KFD}/{node}/properties").splitlines() if " " in line
        )
        number = int(told.get("gfx_target_version", "0") or 0)
        if not number or not int(told.get("simd_count", "0")):
            continue
        place = int(told.get("location_id", "0"))
        address = f"{int(told.get('domain', '0')):04x}:{place >> 8:02x}:{place >> 3 & 31:02x}.{place & 7:x}"
        banks = names(f"{KFD}/{node}/mem_banks")
        sizes = [read(f"{KFD}/{node}/mem_banks/{b}/properties") for b in banks]
        memory = sum(int(m[1]) for s in sizes if (m := re.search(r"size_in_bytes (\d+)", s)))
        found.append(
            Card(
                kind=read(f"{PCI}/{address}/product_name").strip()
                or f"AMD {read(f'{KFD}/{node}/name').strip()}",
                vendor="amd",
                hardware_id=told.get("unique_id", "").strip(" 0") and f"GPU-{int(told['unique_id']):016x}",
                bus_id=address,
                smi_index=len(found),
                arch=gfx(number),
                memory_bytes=memory or None,
                integrated=int(told.get("cpu_cores_count", "0")) > 0 or None,
                numa_node=_number(read(f"{PCI}/{address}/numa_node")),
                **_amd_state(f"{PCI}/{address}", read, names),
            )
        )
    return found


def _amd_state(folder: str, read: Read, names: Names) -> dict[str, Any]:
    """Memory, power, heat and lanes of an AMD card, from its folder in /sys; what is not there is absent."""
    sensors = next((f"{folder}/hwmon/{n}" for n in names(f"{folder}/hwmon")), folder)
    total, used = (_number(read(f"{folder}/mem_info_vram_{n}")) for n in ("total", "used"))
    limit, own = (_number(read(f"{sensors}/power1_cap{n}")) for n in ("", "_default"))
    heat = _number(read(f"{sensors}/temp1_input"))
    return {
        "free_memory_bytes": total - used if total is not None and used is not None else None,
        "power_limit_w": limit / 1e6 if limit else None,
        "default_power_limit_w": own / 1e6 if own else None,
        "temperature_c": heat / 1e3 if heat is not None else None,
        "pcie_width": _number(read(f"{folder}/current_link_width")),
        "max_pcie_width": _number(read(f"{folder}/max_link_width")),
    }


def gfx(number: int) -> str:
    """AMD's number of an architecture in its name. Examples: 100300 is gfx1030, 90010 is gfx90a."""
    return f"gfx{number // 10000}{number // 100 % 100:x}{number % 100:x}"


def from_bus(read: Read, names: Names) -> list[Card]:
    """The displays and accelerators of NVIDIA and AMD on the bus, whether a driver answers or not."""
    found = []
    for address in sorted(names(PCI)):
        vendor = VENDORS.get(read(f"{PCI}/{address}/vendor").strip())
        if vendor is None or not read(f"{PCI}/{address}/class").startswith(DISPLAY_CLASSES):
            continue
        device = read(f"{PCI}/{address}/device").strip().removeprefix("0x")
        number = read(f"{PCI}/{address}/vendor").strip().removeprefix("0x")
        found.append(
            Card(
                kind=f"{vendor.upper()} {number}:{device}",
                vendor=vendor,  # type: ignore[arg-type]
                bus_id=address,
                numa_node=_number(read(f"{PCI}/{address}/numa_node")),
            )
        )
    return found


def _number(text: str) -> int | None:
    found = text.strip()
    return int(found) if found.isdigit() else None
