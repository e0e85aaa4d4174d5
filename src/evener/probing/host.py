"""`look`: what is found on this host, whatever is missing, broken or silent.

Whatever may crash or hang is asked in processes of their own, each with a time limit; each failure becomes a
fact. torch is not imported here.
"""

import json
import os
import platform
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Any

import msgspec
import psutil
from msgspec.structs import replace

from evener.core.host import Card, Cpu, Failure, HostFacts, Interface, NvidiaDriver, Route, TorchBuild
from evener.probing import cards as of_cards
from evener.probing import settings, surroundings
from evener.probing.asking import Answer, ask
from evener.probing.network import interfaces
from evener.probing.overlay import overlay, with_torch

TORCH_S = 90.0
"""Importing torch, starting CUDA and measuring four data types on each device."""
DRIVER_S = 15.0
NAMES_S = 5.0
MARKERS = ("/.dockerenv", "/run/.containerenv")
Ask = Callable[..., Answer]


def look(
    *,
    host: str = "",
    peers: Sequence[str] = (),
    measure: bool = True,
    command_line: Mapping[str, Any] | None = None,
    ask: Ask = ask,
    read: of_cards.Read = surroundings.read,
    names: of_cards.Names = surroundings.names,
) -> HostFacts:
    """What is found on this host: cards, drivers, builds, limits, network, settings; never raises for them.

    `peers` are hosts whose routes are looked up; `measure` times matrix products in each data type on each
    device (a few seconds each). Takes at most about 130 s where everything hangs.
    """
    failures: list[Failure] = []
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None  # before our own work counts
    name = host or socket.gethostname().partition(".")[0].replace("/", "-") or "host"
    build, devices, rates, libcuda = _torch(ask, measure, failures)
    nvidia, found = _nvidia(ask, read, failures, libcuda)
    found += of_cards.from_kfd(read, names)
    found = overlay(found, of_cards.from_bus(read, names))
    hip = bool(build and build.hip)
    found = with_torch(found, [d for d in devices if d], rates, hip=hip)
    processor = surroundings.cpu(read, names)
    told = next((r for r in rates if r.get("index") is None), {})
    processor = replace(processor, dtypes=told.get("rates", {}), dtype_errors=told.get("errors", {}))
    resolves_to, routes = _names(ask, peers, failures)
    network = interfaces()
    addresses = [c.bus_id for c in found if c.vendor == "nvidia" and not c.parent and c.bus_id]
    facts = HostFacts(
        host=name,
        load=load,
        system=platform.system().lower(),
        machine=platform.machine().lower().replace("amd64", "x86_64"),
        kernel=platform.release(),
        python=platform.python_version(),
        evener=_version("evener"),
        wsl=surroundings.wsl(read),
        container=surroundings.container(read, [m for m in MARKERS if os.path.exists(m)], dict(os.environ)),
        torch=build,
        nvidia=nvidia,
        amd=surroundings.amd_driver(read),
        cards=tuple(found),
        modules=surroundings.modules(read),
        cpu=processor,
        interfaces=network,
        resolves_to=resolves_to,
        routes=_with_interfaces(routes, network),
        infiniband=surroundings.infiniband(read, names),
        acs=surroundings.acs(addresses) if len(addresses) > 1 else None,
        settings=_settings(read, command_line or {}, processor, build),
        failures=tuple(failures),
        **surroundings.limits(),
    )
    # what foreign libraries gave may be no text that a file can hold
    raw = json.dumps(msgspec.to_builtins(facts), ensure_ascii=False).encode(errors="replace")
    return msgspec.json.decode(raw, type=HostFacts)


def _python(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", f"evener.probing.{module}", *arguments]


def _torch(
    ask: Ask, measure: bool, failures: list[Failure]
) -> tuple[TorchBuild | None, list[dict[str, Any]], list[dict[str, Any]], str]:
    """The build, the devices it sees, their rates, and the libcuda it loaded."""
    answer = ask(_python("ask_torch", *(["measure"] if measure else [])), TORCH_S)
    told = of_cards.lines(answer.text)
    build = next((t for t in told if t.get("stage") == "build"), {})
    devices: dict[str, Any] = next((t for t in told if t.get("stage") == "devices"), {})
    rates = [t for t in told if t.get("stage") == "rates"]
    if "No module named 'torch'" in build.get("error", ""):
        return None, [], [], ""
    known = {k: v for k, v in build.items() if k in TorchBuild.__struct_fields__ and v is not None}
    if answer.failure:
        if not build:
            known["error"] = f"import torch {answer.failure}"
        elif not devices:
            known["device_error"] = answer.failure
        else:
            failures.append(Failure(asked="rates of data types", how=answer.failure))
    if devices.get("error"):
        known["device_error"] = devices["error"]
    found = msgspec.convert(known, TorchBuild)
    return found, devices.get("devices", []), rates, devices.get("libcuda", "")


def _nvidia(
    ask: Ask, read: of_cards.Read, failures: list[Failure], libcuda: str
) -> tuple[NvidiaDriver | None, list[Card]]:
    """NVIDIA's driver and cards: from NVML, else from nvidia-smi; None where there is no sign of either."""
    kernel, is_open = surroundings.nvidia_kernel(read)
    answer = ask(_python("ask_nvml"), DRIVER_S)
    told = of_cards.lines(answer.text)
    head = next((t for t in told if t.get("stage") == "nvml"), {})
    found, wrong = of_cards.from_nvml(t for t in told if t.get("stage") == "card")
    failures += [Failure(asked="a card, from NVML", how=w) for w in wrong]
    library, error = str(head.get("library", "")), str(head.get("error", ""))
    if answer.failure:
        failures.append(Failure(asked="NVIDIA's driver, through NVML", how=answer.failure))
    if not found and not library:
        table = ask(of_cards.SMI_QUERY, DRIVER_S)
        found, library = of_cards.from_smi(table.text)
        if found:
            found += of_cards.slices_from_smi(ask(of_cards.SMI_LIST, DRIVER_S).text, found)
            error = ""
        elif "No such file" not in table.failure:
            error = table.failure or table.text.strip()[:500] or error
            failures.append(Failure(asked="NVIDIA's driver, through nvidia-smi", how=error or "no cards"))
        elif head.get("missing"):
            error = ""  # neither the package nor the program: no sign of a driver there
    if not (kernel or library or error or found):
        return None, []
    switches = any(n.startswith("nvidia-nvswitch") for n in surroundings.names("/dev"))
    return NvidiaDriver(
        library=library,
        kernel=kernel,
        open_kernel=is_open,
        cuda=str(head.get("cuda", "")),
        fabric=("running" if _runs("nv-fabricmanager") else "stopped") if switches else None,
        compat_library=libcuda if "compat" in libcuda else "",
        error=error if not found else "",
    ), found


def _runs(program: str) -> bool:
    try:
        return any(p.info["name"] == program for p in psutil.process_iter(["name"]))
    except psutil.Error:
        return False


def _names(
    ask: Ask, peers: Sequence[str], failures: list[Failure]
) -> tuple[tuple[str, ...], list[dict[str, Any]]]:
    answer = ask(_python("network", *peers), NAMES_S + 2 * len(peers))
    told = of_cards.lines(answer.text)
    if answer.failure:
        failures.append(Failure(asked="where names of hosts lead", how=answer.failure))
    own = next((t for t in told if t.get("stage") == "name"), {})
    return tuple(own.get("addresses", ())), [t for t in told if t.get("stage") == "route"]


def _with_interfaces(routes: Sequence[dict[str, Any]], here: Sequence[Interface]) -> tuple[Route, ...]:
    by_address = {a: i.name for i in here for a in i.addresses}
    return tuple(
        Route(
            peer=r["peer"],
            interface=by_address.get(r.get("address", ""), ""),
            address=r.get("address", ""),
            error=r.get("error", ""),
        )
        for r in routes
    )


def _settings(
    read: of_cards.Read, command_line: Mapping[str, Any], processor: Cpu, build: TorchBuild | None
) -> tuple[Any, ...]:
    environment = settings.of_interest(os.environ)
    files = settings.nccl_settings(read, os.path.expanduser("~"))
    threads = build.threads if build else processor.threads
    return settings.in_force(
        {
            "command line": command_line,
            "file": {n: v for n, v in files.items() if n not in environment},
            "environment": environment,
            "default": settings.DEFAULTS | ({"OMP_NUM_THREADS": str(threads)} if threads else {}),
        }
    )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
