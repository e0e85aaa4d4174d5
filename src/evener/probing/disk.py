"""What the disk of a folder reads and writes a second, beyond the page cache.

round   write 256 MB, until the disk has them │ let the cache go │ read them
"""

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from evener.core.figures import Figure
from evener.core.fleet import Disk
from evener.errors import FileError, UsageError
from evener.probing.rounds import Clock, covering

NUM_BYTES = 2**28
ROUNDS = 5
_AT_ONCE = 2**23
IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")


def kind_of(folder: Path) -> str:
    """The kind of file system that `folder` is on, "" where nobody says. Example: "ext4"."""
    place = folder.resolve()
    mounts = {m.mountpoint: m.fstype for m in psutil.disk_partitions(all=True)}
    return next((mounts[str(p)] for p in (place, *place.parents) if str(p) in mounts), "")


def measure_disk(
    folder: Path,
    *,
    num_bytes: int = NUM_BYTES,
    rounds: int = ROUNDS,
    clock: Clock = time.perf_counter,
    kind: Callable[[Path], str] = kind_of,
) -> Disk:
    """Rates of the disk of `folder` in bytes a second, medians over rounds, and its free bytes.

    Writes one file without a name, of `num_bytes`, round after round; nothing is left of it. UsageError for a
    folder in memory, FileError where it cannot be written. Example: 256 MiB in 0.4 s are 671 MB/s.
    """
    if kind(folder) in IN_MEMORY:
        raise UsageError(
            f"{folder} is in memory ({kind(folder)}), on no disk", remedy="a folder on a disk for --disk"
        )
    buffer = bytearray(os.urandom(_AT_ONCE))  # which no disk packs
    writes, reads = [], []
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            for number in range(-1, rounds):
                written_s, read_s = (
                    _timed(work, file.fileno(), num_bytes, buffer, clock) for work in (_write, _read)
                )
                if number >= 0:
                    writes.append(num_bytes / written_s)
                    reads.append(num_bytes / read_s)
        free = shutil.disk_usage(folder).free
    except OSError as e:
        raise FileError(
            f"the disk of {folder} cannot be measured: {e.strerror}",
            numbers=f"{num_bytes} bytes are written",
            remedy="a folder that this user may write to, with room",
        ) from e
    note = f"{num_bytes} bytes at once, the page cache let go before they are read"
    return Disk(
        read_bytes_per_s=covering(reads, note=note),
        write_bytes_per_s=covering(writes, note=note),
        free_bytes=Figure(value=max(free, 1), source="measured"),
    )


def _timed(
    work: Callable[[int, int, bytearray], None], fd: int, num_bytes: int, buffer: bytearray, clock: Clock
) -> float:
    os.lseek(fd, 0, os.SEEK_SET)
    os.posix_fadvise(fd, 0, num_bytes, os.POSIX_FADV_DONTNEED)
    start = clock()
    work(fd, num_bytes, buffer)
    return clock() - start


def _write(fd: int, num_bytes: int, buffer: bytearray) -> None:
    left = num_bytes
    while left:
        left -= os.write(fd, memoryview(buffer)[: min(left, len(buffer))])
    os.fdatasync(fd)


def _read(fd: int, num_bytes: int, buffer: bytearray) -> None:
    left = num_bytes
    while left and (found := os.readv(fd, [memoryview(buffer)[: min(left, len(buffer))]])):
        left -= found
