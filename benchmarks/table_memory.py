"""A table of twice the largest single budget trains in parts, and takes the memory that was predicted."""

import argparse
import resource
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.common import Bar, run_processes, say
from evener.core.tables import TableUse
from evener.runtime.tables.exchange import RowExchange
from evener.runtime.tables.layer import place_table
from evener.runtime.tables.optimizers import TableAdam
from evener.runtime.tables.sharing import bounds_of, fetch, in_memory, take_part

DIM, BATCH, STEPS = 64, 512, 5
BUDGETS = (5, 3, 2)  # in proportion: the largest is half of the table


def memory(args: argparse.Namespace) -> tuple[dict[str, Any], list[Bar]]:
    """Three processes with 5:3:2 of a table under Adam; each may not have more than its budget."""
    rows = 20_000 if args.quick else 1_000_000
    use = TableUse(name="emb", num_rows=rows, dim=DIM, state_numbers=2 * DIM + 1)
    parts = {f"d{i}": rows * b // sum(BUDGETS) for i, b in enumerate(BUDGETS)}
    outcomes = run_processes(_train, len(BUDGETS), parts, rows)
    row_bytes = use.held_bytes / rows
    figures: dict[str, Any] = {"table_bytes": use.held_bytes}
    bars = []
    for (name, own), (grown, held) in zip(parts.items(), outcomes, strict=True):
        predicted = own * row_bytes
        figures[name] = {"peak_bytes": grown, "predicted_bytes": predicted, "held_bytes": held}
        say(f"{name}: {own} rows, {grown / 2**20:.0f} MiB at most, predicted {predicted / 2**20:.0f}")
        if not args.quick:
            bars.append(
                Bar(name=f"{name}: peak away from predicted", value=abs(grown / predicted - 1), at_most=0.05)
            )
    bars.append(Bar(name="table over the largest part", value=rows / max(parts.values()), at_least=2.0))
    return figures, bars


def _train(rank: int, world_size: int, parts: dict[str, int], rows: int) -> tuple[int, int]:
    """(bytes that the peak grew by while the table was made and trained, bytes of its tensors)."""
    model = nn.Sequential(nn.Embedding(rows, DIM, device="meta"))
    exchange = RowExchange(world_size)
    _steps(model, exchange, None, rank, 1)  # what torch and gloo take, whatever the table
    before = _peak()
    bounds = bounds_of("0", rows, parts, list(parts))
    table = place_table(model, "0").table
    take_part(table, bounds, rank, exchange, in_memory, seed=0)
    table.use(TableAdam())
    _steps(model, exchange, table, rank, STEPS)
    for column in table.part.rows.columns.values():
        column.sum()  # zeros that nobody touched yet take no memory
    return _peak() - before, table.num_bytes


def _steps(model: nn.Sequential, exchange: RowExchange, table: Any, rank: int, steps: int) -> None:
    small = nn.Sequential(nn.Embedding(1000, DIM)) if table is None else model
    if table is None:
        table = place_table(small, "0").table
        take_part(table, (0, 400, 800, 1000), rank, exchange, in_memory, seed=0)
        table.use(TableAdam())
    for step in range(steps):
        generator = torch.Generator().manual_seed(step * 10 + rank)
        ids = torch.randint(0, table.num_rows, (BATCH,), generator=generator)
        fetch([table], {"0": lambda batch: batch}, [ids], exchange)
        table.begin(1.0)
        small(ids).square().sum().backward()
        table.sum_up()
        table.move(0.01)
        table.discard()


def _peak() -> int:
    """The most memory that this process had so far, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
