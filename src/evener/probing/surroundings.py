"""What surrounds the devices, from /proc and /sys: limits, shared memory, processors, container, bridges."""

import os
import platform
import resource
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from evener.core.host import UNLIMITED, AmdDriver, Cpu
from evener.probing.cards import Names, Read

MODULES = ("nvidia", "nouveau", "amdgpu", "xe", "i915")
ACS = 0x000D
"""Id of the PCI capability for access control; bits 2 and 3 of its control word redirect peer traffic."""
EXTENDED = 0x100


def read(path: str) -> str:
    """A small text file; "" where it is missing or may not be read."""
    try:
        with open(path, "rb") as file:
            return file.read(2**20).decode(errors="replace")
    except OSError:
        return ""


def names(path: str) -> list[str]:
    """What a folder holds; nothing where it is missing or may not be read."""
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []


def limits() -> dict[str, Any]:
    """Limits of a process, and shared memory."""
    files, locked = (resource.getrlimit(r)[0] for r in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK))
    found: dict[str, Any] = {"open_files": _limit(files), "locked_bytes": _limit(locked)}
    with suppress(OSError):  # where there is none it stays absent
        shm = os.statvfs("/dev/shm")
        found["shm_bytes"] = shm.f_frsize * shm.f_blocks
    return found


def _limit(value: int) -> int:
    return UNLIMITED if value in (resource.RLIM_INFINITY, -1) else min(value, UNLIMITED)


def cpu(read: Read, names: Names) -> Cpu:
    """Processors, memory and memory nodes."""
    model = next((x.partition(":")[2] for x in read("/proc/cpuinfo").splitlines() if "model name" in x), "")
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    nodes = sorted(int(n[4:]) for n in names("/sys/devices/system/node") if n[4:].isdigit())
    mine = [n for n in nodes if allowed & numbers(read(f"/sys/devices/system/node/node{n}/cpulist"))]
    return Cpu(
        model=model.strip() or platform.processor() or platform.machine(),
        cores=psutil.cpu_count(logical=False),
        threads=len(allowed) or psutil.cpu_count(),
        memory_bytes=psutil.virtual_memory().total,
        nodes=tuple(nodes),
        allowed_nodes=tuple(mine),
    )


def numbers(text: str) -> set[int]:
    """A list of ranges as Linux writes it. Example: "0-2,8" is {0, 1, 2, 8}."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            found |= set(range(int(first), int(last or first) + 1))
    return found


def container(read: Read, exists: Iterable[str], environment: dict[str, str]) -> str:
    """ "docker", "podman", "kubernetes", "lxc" or ""; `exists` lists marker files that are there."""
    first = read("/proc/1/cgroup")
    if "KUBERNETES_SERVICE_HOST" in environment or "kubepods" in first:
        return "kubernetes"
    if "/run/.containerenv" in exists or "libpod" in first:
        return "podman"
    if "/.dockerenv" in exists or "docker" in first:
        return "docker"
    return "lxc" if "lxc" in first or "container=lxc" in read("/proc/1/environ") else ""


def wsl(read: Read) -> bool:
    """Whether the kernel is that of the Windows Subsystem for Linux."""
    return "microsoft" in read("/proc/version").lower()


def modules(read: Read) -> tuple[str, ...]:
    """Kernel modules of interest that are loaded."""
    loaded = {line.partition(" ")[0] for line in read("/proc/modules").splitlines()}
    return tuple(m for m in MODULES if m in loaded)


def nvidia_kernel(read: Read) -> tuple[str, bool | None]:
    """Version of NVIDIA's loaded module, and whether it is the open one; ("", None) without one."""
    line = read("/proc/driver/nvidia/version").partition("\n")[0]
    words = [w for w in line.split() if w[0].isdigit() and "." in w]
    return (words[0], "Open Kernel Module" in line) if words else ("", None)


def amd_driver(read: Read, kfd: str = "/dev/kfd") -> AmdDriver | None:
    """AMD's driver; None on a host without any sign of it."""
    version = read("/sys/module/amdgpu/version").strip()
    rocm = read("/opt/rocm/.info/version").strip()
    if not os.path.exists(kfd):
        return AmdDriver(kernel=version, rocm=rocm, kfd="absent") if version or rocm else None
    try:
        os.close(os.open(kfd, os.O_RDWR))
    except OSError as e:
        denied = isinstance(e, PermissionError)
        return AmdDriver(
            kernel=version, rocm=rocm, kfd="denied" if denied else "absent", error=f"{kfd}: {e.strerror}"
        )
    return AmdDriver(kernel=version, rocm=rocm, kfd="ok")


def infiniband(read: Read, names: Names) -> tuple[str, ...]:
    """InfiniBand and RoCE ports that are active."""
    top = "/sys/class/infiniband"
    ports = [(card, port) for card in names(top) for port in names(f"{top}/{card}/ports")]
    return tuple(f"{c}:{p}" for c, p in ports if "ACTIVE" in read(f"{top}/{c}/ports/{p}/state"))


def redirects(configuration: bytes) -> bool | None:
    """Whether a bridge redirects traffic between the devices below it; None where its words are not shown.

    `configuration` is the bridge's PCI configuration space, of which only root sees more than 64 bytes.
    """
    place = EXTENDED
    if len(configuration) < 0x1000:
        return None
    for _ in range(64):
        head = int.from_bytes(configuration[place : place + 4], "little")
        if head & 0xFFFF == ACS:
            return bool(int.from_bytes(configuration[place + 6 : place + 8], "little") & 0b1100)
        place = head >> 20 & 0xFFC
        if place < EXTENDED:
            return False
    return False


def acs(addresses: Iterable[str]) -> bool | None:
    """Whether any bridge above the cards at `addresses` redirects; None where it cannot be known."""
    seen = []
    for address in addresses:
        path = Path("/sys/bus/pci/devices", address).resolve()
        for above in path.parents:
            file = above / "config"
            if not file.exists():
                break
            try:
                seen.append(redirects(file.read_bytes()))
            except OSError:
                seen.append(None)
    known = [s for s in seen if s is not None]
    return any(known) if known else None
