"""Every setting in force with where it comes from: argument, command line, file, environment, default."""

from collections.abc import Mapping
from typing import Any

from evener.core.host import Setting
from evener.probing.cards import Read

PREFIXES = (
    "NCCL_",
    "RCCL_",
    "GLOO_",
    "OMP_",
    "MKL_",
    "KMP_",
    "CUDA_",
    "NVIDIA_",
    "HIP_",
    "ROCR_",
    "HSA_",
    "AMD_",
    "EVENER_",
    "TORCH_",
    "PYTORCH_",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
)
SECRET = ("TOKEN", "SECRET", "PASSWORD", "KEY", "CREDENTIAL")
ORDER = ("argument", "command line", "file", "environment", "default")
"""The first of these that sets a name wins."""
NCCL_FILES = ("/etc/nccl.conf", "{home}/.nccl.conf")
DEFAULTS = {"CUDA_DEVICE_ORDER": "FASTEST_FIRST", "NCCL_SOCKET_IFNAME": "^lo,docker", "EVENER_RUNS": "runs"}
MOST_LETTERS = 2000


def in_force(given: Mapping[str, Mapping[str, Any]]) -> tuple[Setting, ...]:
    """The settings by name, each from the first origin in `ORDER` that has it; values of secrets are masked.

    Example: {"environment": {"NCCL_DEBUG": "INFO"}, "default": {"NCCL_DEBUG": "WARN"}} gives INFO.
    """
    found: dict[str, Setting] = {}
    for origin in ORDER:
        for name, value in given.get(origin, {}).items():
            if name not in found:
                found[name] = Setting(name=name, value=_shown(name, str(value)), origin=origin)
    return tuple(sorted(found.values(), key=lambda s: s.name))


def of_interest(environment: Mapping[str, str]) -> dict[str, str]:
    """The part of an environment that concerns devices and what they talk over."""
    return {name: value for name, value in environment.items() if name.startswith(PREFIXES)}


def nccl_settings(read: Read, home: str) -> dict[str, str]:
    """What NCCL reads from its own files; the environment goes before them, so only the rest is in force."""
    found: dict[str, str] = {}
    for path in NCCL_FILES:
        for line in read(path.format(home=home)).splitlines():
            name, equals, value = line.partition("=")
            if equals and name.strip().startswith("NCCL_"):
                found[name.strip()] = value.strip()
    return found


def _shown(name: str, value: str) -> str:
    return "(set, not shown)" if any(word in name.upper() for word in SECRET) else value[:MOST_LETTERS]
