"""The one place that knows ranks: device names in the order of their processes."""

from dataclasses import dataclass


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
