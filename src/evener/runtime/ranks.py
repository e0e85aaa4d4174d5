"""The one place that knows ranks: device names in the order of their processes."""

from dataclasses import dataclass
from datetime import timedelta

PATIENCE = timedelta(minutes=30)
"""Of a message or a sum; a lost peer closes its socket, so this is for a silent network.

Said with each wait for a message: without, Gloo waits as long as it would have for the group to be formed.
"""


@dataclass(frozen=True)
class Ranks:
    """The devices of a job in rank order, and which of them this process drives."""

    devices: tuple[str, ...]
    here: str

    @property
    def rank(self) -> int:
        return self.devices.index(self.here)

    @property
    def world_size(self) -> int:
        return len(self.devices)
