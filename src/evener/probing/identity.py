"""Which devices there are: name, kind, hardware id and memory of everything torch can use on this host."""

import hashlib
import os
import platform
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch

from evener.core.figures import Figure
from evener.core.fleet import Device
from evener.core.words import counted
from evener.errors import UnknownNameError

GPU_TYPES = ("cuda", "xpu", "mps")
MACHINE_ID_FILES = ("/etc/machine-id", "/var/lib/dbus/machine-id")
MEMORY_LIMIT_FILES = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def host_name() -> str:
    """This host's name as it stands before the slash of a device name."""
    return socket.gethostname().partition(".")[0].replace("/", "-") or "host"


def devices_here(
    host: str,
    *,
    accelerator: Any = torch.accelerator,
    module_of: Callable[[str], Any] = torch.get_device_module,
    read: Callable[[str], str] | None = None,
) -> tuple[Device, ...]:
    """Every device torch can use here, with name, kind, type, index, hardware id and memory; the CPU is last.

    Example: ("lab1/gpu0" of kind "NVIDIA GeForce RTX 3060", "lab1/cpu" of kind "AMD EPYC (8 threads)").
    """
    found = []
    if accelerator.is_available():
        type_ = accelerator.current_accelerator().type
        local = "gpu" if type_ in GPU_TYPES else type_
        for index in range(accelerator.device_count()):
            kind, hardware_id, total = _accelerator_identity(module_of(type_), type_, index)
            found.append(
                Device(
                    name=f"{host}/{local}{index}",
                    kind=kind,
                    type=type_,
                    index=index,
                    hardware_id=hardware_id,
                    memory_bytes=_measured(total),
                )
            )
    threads = torch.get_num_threads()
    model = _cpu_model()
    hardware_id = f"cpu-{_digest(_machine_id(read or _read), model)}"
    kind = f"{model} ({counted(threads, 'thread')})"
    found.append(
        Device(
            name=f"{host}/cpu",
            kind=kind,
            hardware_id=hardware_id,
            threads=threads,
            memory_bytes=_measured(_host_memory(read or _read)[1]),
        )
    )
    return tuple(found)


def select(devices: Sequence[Device], wanted: Sequence[str]) -> tuple[Device, ...]:
    """The devices that `wanted` names, in its order: lab1/gpu0, gpu0, cuda:0, or cuda for all of a type.

    UnknownNameError lists the names there are.
    """
    chosen: dict[str, Device] = {}
    for word in wanted:
        matching = [d for d in devices if word in _names(d)]
        if not matching:
            raise UnknownNameError(
                f"no device {word!r} on this host",
                remedy="one of: " + ", ".join(f"{d.name} ({_torch_name(d)})" for d in devices),
            )
        chosen.update({d.name: d for d in matching})
    return tuple(chosen.values())


def torch_device(device: Device) -> torch.device:
    """The torch device behind a fleet entry of this host."""
    return torch.device(_torch_name(device))


def free_bytes(device: Device) -> int:
    """Bytes that are free now on the device, or in the host's memory where the device shares it."""
    if device.type != "cpu":
        with suppress(RuntimeError, NotImplementedError):  # not told where memory is shared, as on Apple
            return torch.accelerator.get_memory_info(torch_device(device))[0]
    return _host_memory(_read)[0]


def _host_memory(read: Callable[[str], str]) -> tuple[int, int]:
    """(free, total) bytes of the host, or of this process's cgroup where its limit is lower."""
    memory = psutil.virtual_memory()
    total, free = memory.total, memory.available
    for file in MEMORY_LIMIT_FILES:
        text = read(file).strip()
        if text.isdigit() and int(text) < total:
            total = int(text)
    return min(free, total), total


def _measured(num_bytes: int | None) -> Figure | None:
    return Figure(value=num_bytes, source="measured") if num_bytes else None


def _names(device: Device) -> tuple[str, ...]:
    return device.name, device.name.partition("/")[2], _torch_name(device), device.type


def _torch_name(device: Device) -> str:
    return device.type if device.index is None else f"{device.type}:{device.index}"


def _accelerator_identity(module: Any, type_: str, index: int) -> tuple[str, str, int | None]:
    """Kind, hardware id (its UUID, else its PCI address, else what NVML says, else none) and total bytes."""
    try:
        properties: Any = module.get_device_properties(index)
    except Exception:
        properties = None
    kind = getattr(properties, "name", "") or f"{type_} of {platform.machine()}"
    total = getattr(properties, "total_memory", None)
    uuid = getattr(properties, "uuid", None)
    if uuid:
        return kind, f"{'GPU-' if type_ == 'cuda' else ''}{uuid}", total
    if hasattr(properties, "pci_bus_id"):
        domain = getattr(properties, "pci_domain_id", 0)
        return kind, f"{domain:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}", total
    return kind, _nvml_uuid(index) if type_ == "cuda" else "", total


def _nvml_uuid(index: int) -> str:
    try:  # the package may be missing, and its library raises errors of many types
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(index)))
    except Exception:
        return ""


def _cpu_model() -> str:
    try:
        model = str(torch.cpu.get_capabilities().get("cpu_name", ""))
    except Exception:
        model = ""
    return model.strip() or platform.processor() or platform.machine() or "CPU"


def _machine_id(read: Callable[[str], str]) -> str:
    return next((text for text in map(read, MACHINE_ID_FILES) if text.strip()), "") or platform.node()


def _digest(*words: str) -> str:
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:16]


def _read(path: str) -> str:
    try:
        return Path(path).read_text() if os.path.exists(path) else ""
    except OSError:
        return ""
