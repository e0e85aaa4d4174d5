"""What a job asks of one embedding table, and what a device of the job could hold of it."""

from evener.core.figures import Curve, Figure, Source, Value


class TableUse(Value, frozen=True, kw_only=True):
    """A table of `num_rows` rows of `dim` numbers of `number_bytes` bytes each.

    `ids_per_sample` are looked up for a sample, of which the part `distinct` are different rows of a step
    (`source` says how that is known). `state_numbers` are the optimiser's for a row: 2 · dim for Adam.
    Example: 4,096 samples with 1 id each, of which 0.54 are distinct, touch 2,212 rows.
    """

    name: str
    num_rows: int
    dim: int
    ids_per_sample: float = 1.0
    distinct: float = 1.0
    state_numbers: int = 0
    number_bytes: int = 4
    source: Source = "assumed"

    def __post_init__(self) -> None:
        if self.num_rows < 1 or self.dim < 1 or self.number_bytes < 1 or self.state_numbers < 0:
            raise ValueError(f"the table {self.name!r} has no rows, or rows of nothing")
        if not 0 < self.distinct <= 1 or not 0 < self.ids_per_sample < float("inf"):
            raise ValueError(f"the table {self.name!r} is asked for no rows, or for more than there are ids")

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's numbers. Example: 64 numbers in float32 are 256 bytes."""
        return self.dim * self.number_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of all rows with their state. Example: 2 million rows of 64 under Adam: 1.54 GB."""
        return self.num_rows * (self.row_bytes + self.state_numbers * self.number_bytes)

    def touched(self, samples: int) -> float:
        """Rows that a step of `samples` samples looks up, each counted once."""
        return min(float(self.num_rows), self.ids_per_sample * samples * self.distinct)


class TableSite(Value, frozen=True, kw_only=True):
    """A device of a job as a place for tables: bytes that they may take, and rates of memory, bytes/s.

    The host's memory is what is left for this device's process. A CPU has no other, and no `device_rate`.
    Bytes are None where nobody knows them. `bus` leads from the host to the device.
    """

    device: str
    host_bytes: int | None = None
    device_bytes: int | None = None
    host_rate: Figure
    device_rate: Figure | None = None
    bus: Curve | None = None

    @property
    def is_accelerator(self) -> bool:
        """Whether the device has memory of its own."""
        return self.device_rate is not None

    @property
    def own_rate(self) -> Figure:
        """That of the memory in which the device computes."""
        return self.device_rate or self.host_rate

    @property
    def own_bytes(self) -> int | None:
        """What tables may take of that memory."""
        return self.device_bytes if self.is_accelerator else self.host_bytes
