"""What the installed torch says of itself and its devices: a process of its own, since its import may crash.

Run as `python -m evener.probing.ask_torch [measure]`. Each stage is a line on standard output, "EVENER" and
one JSON object, so that what is known before a crash or hang is not lost.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

MARK = "EVENER "
SLOT_S = 0.01


def tell(stage: str, **what: Any) -> None:
    """One line for the process that asked."""
    print(MARK + json.dumps({"stage": stage, **what}), flush=True)


def last_line(error: BaseException) -> str:
    """An error in one line."""
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}: {said[-1] if said else 'no words'}"[:500]


def attempt(call: Callable[[], Any], fallback: Any = None) -> Any:
    """What `call` gives; `fallback` where it raises."""
    try:
        return call()
    except Exception:
        return fallback


def main(measure: bool) -> None:
    """Tell build, devices and, if asked, measured rates."""
    try:
        import torch
    except BaseException as e:  # half-installed libraries raise errors of all kinds, SystemExit among them
        tell("build", error=last_line(e))
        return
    nccl = attempt(lambda: ".".join(map(str, torch.cuda.nccl.version())))
    hip = getattr(torch.version, "hip", None)
    archs = attempt(torch._C._cuda_getArchFlags, "") if torch.version.cuda or hip else ""
    tell(
        "build",
        version=str(torch.__version__),
        cuda=torch.version.cuda,
        hip=hip,
        archs=(archs or "").split(),
        nccl=nccl,
        threads=torch.get_num_threads(),
    )
    tell_devices(torch)
    if measure:
        measure_all(torch)


def tell_devices(torch: Any) -> None:
    """Tell each accelerator, or how asking for them ended."""
    try:
        if not torch.accelerator.is_available():
            if torch.version.cuda or getattr(torch.version, "hip", None):
                torch.zeros(1, device="cuda")  # raises the reason
            tell("devices", devices=[])
            return
        kind = torch.accelerator.current_accelerator().type
        found = [describe(torch, kind, i) for i in range(torch.accelerator.device_count())]
        tell("devices", devices=found, libcuda=libcuda())
    except BaseException as e:
        tell("devices", devices=[], error=last_line(e), libcuda=libcuda())


def describe(torch: Any, kind: str, index: int) -> dict[str, Any]:
    """One accelerator in words; what torch does not tell is absent."""
    p = torch.get_device_module(kind).get_device_properties(index)
    major, minor = getattr(p, "major", None), getattr(p, "minor", None)
    gcn = getattr(p, "gcnArchName", "") if torch.version.hip else ""
    arch = gcn.partition(":")[0]
    if not arch and kind == "cuda" and major is not None:
        arch = f"sm_{major * 10 + minor}"
    bus = ""
    if hasattr(p, "pci_bus_id"):
        bus = f"{getattr(p, 'pci_domain_id', 0):04x}:{p.pci_bus_id:02x}:{p.pci_device_id:02x}.0"
    return {
        "index": index,
        "type": kind,
        "name": getattr(p, "name", ""),
        "uuid": str(getattr(p, "uuid", "")),
        "bus_id": bus,
        "arch": arch,
        "memory_bytes": getattr(p, "total_memory", None),
        "integrated": bool(getattr(p, "is_integrated", False)) or None,
    }


def libcuda() -> str:
    """The libcuda that this process has loaded."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            return next((line.split()[-1] for line in maps if "/libcuda.so" in line), "")
    except OSError:
        return ""


def measure_all(torch: Any) -> None:
    """Tell the rate of matrix products in each data type, device by device; the CPU last."""
    from evener.probing.rates import DTYPES, product_rate

    places = []
    if attempt(torch.accelerator.is_available, False):
        kind = torch.accelerator.current_accelerator().type
        places = [torch.device(kind, i) for i in range(torch.accelerator.device_count())]
    for place in [*places, torch.device("cpu")]:
        rates, errors = {}, {}
        for name, dtype in DTYPES.items():
            try:
                rates[name] = product_rate(place, dtype, clock=time.perf_counter, slot_s=SLOT_S)
            except Exception as e:  # no kernel, no such type, out of memory, a lost device
                errors[name] = last_line(e)
        tell("rates", index=place.index, rates=rates, errors=errors)


if __name__ == "__main__":
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    main("measure" in sys.argv[1:])
