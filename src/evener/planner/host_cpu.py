"""A host's CPU as one more device: the threads that it may compute with beside accelerators."""

from dataclasses import dataclass

from evener.core.words import counted


@dataclass(frozen=True, kw_only=True)
class Threads:
    """Threads with which a host's CPU computes, and the sum that gives them."""

    compute: int
    why: str


def threads_left(
    threads: int, *, accelerators: int, loader_workers: int = 0, tables: bool = False
) -> Threads:
    """What `accelerators` processes, their data loading and their tables leave of a host's `threads`.

        left = threads - accelerators · (1 + workers + tables) - workers

    Each accelerator's process has a thread that queues its work, `loader_workers` that read its samples and,
    with tables in host memory, one that looks up rows; the CPU's own process computes in the thread that
    queues, and has its workers. Never fewer than one: what it is worth then is measured like anything else.
    Example: 16 threads beside 2 accelerators with 2 workers each and tables: 16 - 2 · 4 - 2 = 6.
    """
    each = 1 + loader_workers + tables
    left = threads - accelerators * each - loader_workers
    parts = [
        f"{accelerators} that queue for {'an accelerator' if accelerators == 1 else 'accelerators'}",
        *([f"{loader_workers * (accelerators + 1)} that load data"] if loader_workers else []),
        *([f"{accelerators} that look up tables"] if tables else []),
    ]
    said = f"{counted(threads, 'thread')} less {', '.join(parts)}"
    if left >= 1:
        return Threads(compute=left, why=f"computes with {left}: {said}")
    return Threads(compute=1, why=f"computes with 1, which it shares: {said} leave {max(left, 0)}")
