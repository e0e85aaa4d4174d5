"""Hardware → Fleet: every number measured on this host, with its spread."""

from evener.probing.identity import devices_here, host_name
from evener.probing.survey import probe

__all__ = ["devices_here", "host_name", "probe"]
