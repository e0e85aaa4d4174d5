"""What NVML says of driver and cards: a process of its own, since its library raises and crashes.

Run as `python -m evener.probing.ask_nvml`. Lines as in `ask_torch`.
"""

from functools import partial
from typing import Any

from evener.probing.ask_torch import attempt, last_line, tell

THROTTLE = {"power": 0x4, "heat": 0x20 | 0x40, "brake": 0x80}
"""Bits of NVML's clock event reasons: power cap, thermal slowdown in software and hardware, power brake."""
MODES = {0: "default", 1: "exclusive", 2: "prohibited", 3: "exclusive"}


def main() -> None:
    """Tell driver and cards."""
    try:
        import pynvml as nvml

        nvml.nvmlInit()
    except BaseException as e:  # the package may be another's of the same name, or broken
        tell("nvml", error=last_line(e), missing=isinstance(e, ImportError))
        return
    cuda = attempt(lambda: nvml.nvmlSystemGetCudaDriverVersion_v2())
    tell(
        "nvml",
        library=text(attempt(nvml.nvmlSystemGetDriverVersion, "")),
        cuda=f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else "",
    )
    for index in range(attempt(nvml.nvmlDeviceGetCount, 0)):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
        except Exception as e:
            tell("card", smi_index=index, error=last_line(e))
            continue
        tell("card", smi_index=index, **card(nvml, handle))
        for part in slices(nvml, handle):
            tell("card", **part)


def card(nvml: Any, handle: Any) -> dict[str, Any]:
    """One card; what NVML does not tell is absent."""
    memory = attempt(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
    capability = attempt(lambda: nvml.nvmlDeviceGetCudaComputeCapability(handle))
    reasons = attempt(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle), 0)
    mig = attempt(lambda: nvml.nvmlDeviceGetMigMode(handle)[0])
    watts = {
        "power_limit_w": attempt(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle)),
        "default_power_limit_w": attempt(lambda: nvml.nvmlDeviceGetPowerManagementDefaultLimit(handle)),
    }
    return {
        "kind": text(attempt(lambda: nvml.nvmlDeviceGetName(handle), "")),
        "hardware_id": text(attempt(lambda: nvml.nvmlDeviceGetUUID(handle), "")),
        "bus_id": text(attempt(lambda: nvml.nvmlDeviceGetPciInfo(handle).busId, "")),
        "arch": f"sm_{capability[0] * 10 + capability[1]}" if capability else "",
        "memory_bytes": getattr(memory, "total", None),
        "free_memory_bytes": getattr(memory, "free", None),
        "mig": None if mig is None else bool(mig),
        "compute_mode": MODES.get(attempt(lambda: nvml.nvmlDeviceGetComputeMode(handle), -1)),
        "clock_mhz": attempt(lambda: nvml.nvmlDeviceGetClockInfo(handle, 1)),
        "max_clock_mhz": attempt(lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, 1)),
        **{name: value / 1000 if value else None for name, value in watts.items()},
        "temperature_c": attempt(lambda: nvml.nvmlDeviceGetTemperature(handle, 0)),
        "throttle": [name for name, bits in THROTTLE.items() if reasons & bits],
        "pcie_width": attempt(lambda: nvml.nvmlDeviceGetCurrPcieLinkWidth(handle)),
        "max_pcie_width": attempt(lambda: nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)),
    }


def slices(nvml: Any, handle: Any) -> list[dict[str, Any]]:
    """The MIG devices of a card."""
    found = []
    for i in range(attempt(lambda: nvml.nvmlDeviceGetMaxMigDeviceCount(handle), 0) or 0):
        part = attempt(partial(nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, i))
        if part is not None:
            parent = text(attempt(lambda: nvml.nvmlDeviceGetUUID(handle), ""))
            found.append({**card(nvml, part), "mig": True, "parent": parent})
    return found


def text(value: Any) -> str:
    """NVML gives bytes or text, by version."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


if __name__ == "__main__":
    main()
