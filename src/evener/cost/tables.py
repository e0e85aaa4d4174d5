"""What an embedding table costs a step: looked up row by row in host memory, or dense on every device."""

from collections.abc import Sequence
from dataclasses import dataclass

from evener.core.collectives import all_reduce_seconds
from evener.core.figures import Curve
from evener.core.tables import TableUse

ID_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class TablePrice:
    """Seconds a step by what takes them, and bytes that stay in memory."""

    memory_s: float
    transfer_s: float
    exchange_s: float
    held_bytes: int

    @property
    def total_s(self) -> float:
        """Seconds, nothing of it hidden behind computing."""
        return self.memory_s + self.transfer_s + self.exchange_s


def looked_up(
    use: TableUse,
    samples: int,
    *,
    memory_bytes_per_s: float,
    bus: Curve | None,
    hops: Sequence[Curve | None],
    trips: int = 2,
) -> TablePrice:
    """Rows in parts over as many devices as there are `hops`; `bus` leads from the host to the accelerator.

        u        = rows touched (core/tables), r = bytes of a row, s = bytes of its state
        memory   = u · (2 r lookup + 3 r gradient + 2 r + 2 s update) / bandwidth
        transfer = trips · bus(u · r)   2: rows there, gradients back; 4 from a device's own memory, through
                                        the host and back
        exchange = (n - 1) · max hop(u / n · (8 + 2 r + 4) / (n - 1))    ids, rows, gradients to other owners

    Example: 2,192 rows of 256 bytes, SGD, 10 GB/s, one device: 2,192 · 1,792 / 1e10 = 0.39 ms.
    """
    rows, row = use.touched(samples), use.row_bytes
    state = use.state_numbers * use.number_bytes
    n = len(hops)
    exchange_s = 0.0
    if n > 1:
        away = rows / n * (n - 1) / n * (ID_BYTES + 2 * row + use.number_bytes)
        slowest = max(0.0 if h is None else h.seconds(away / (n - 1)) for h in hops)
        exchange_s = (n - 1) * slowest
    return TablePrice(
        memory_s=rows * (7 * row + 2 * state) / memory_bytes_per_s,
        transfer_s=0.0 if bus is None else trips * bus.seconds(rows * row),
        exchange_s=exchange_s,
        held_bytes=use.held_bytes,
    )


def dense(use: TableUse, *, memory_bytes_per_s: float, hops: Sequence[Curve | None]) -> TablePrice:
    """The whole table on every device, with a gradient for every row.

        memory   = rows · (r written, r read, 2 r weight, 2 s state) / bandwidth
        exchange = all-reduce(rows · r)

    Example: 2 million rows of 256 bytes, SGD, 10 GB/s, one device: 512e6 · 4 / 1e10 = 205 ms.
    """
    whole = use.num_rows * use.row_bytes
    state = use.num_rows * use.state_numbers * use.number_bytes
    return TablePrice(
        memory_s=(4 * whole + 2 * state) / memory_bytes_per_s,
        transfer_s=0.0,
        exchange_s=all_reduce_seconds(whole, hops),
        held_bytes=use.held_bytes + whole,
    )
