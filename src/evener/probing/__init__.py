"""Hardware → Fleet: every number measured on this host, with its spread.

Names are loaded when first used: `evener.probing.host` looks at hosts whose torch cannot be imported.
"""

from importlib import import_module
from typing import Any

_HOME = {
    "devices_here": "evener.probing.identity",
    "host_name": "evener.probing.identity",
    "probe": "evener.probing.survey",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'evener.probing' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
