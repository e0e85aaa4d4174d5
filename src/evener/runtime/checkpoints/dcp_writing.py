"""State as a checkpoint of `torch.distributed.checkpoint` (DCP), written by torch's own saver part by part.

    model.head.weight                  10 x 4 of two owners: rows 0:5 and [5, 0:1]; [5, 1:4] and rows 6:10
    optim.state.head.weight.exp_avg    the same, as torch's `get_state_dict` would name them

The saver asks a planner what there is to write (`SavePlanner`, torch's public interface for that) and for
each part when its turn comes: so nothing is put together, and one part is in memory at a time. Owners have
values that follow each other, wherever that cuts a tensor; DCP knows boxes: such values are a few of them.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

PART_BYTES = 16 * 2**20
Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes in a tensor."""


@dataclass(frozen=True)
class Stretch:
    """The values `start` to `stop` of a tensor laid end to end; `read(a, b)` gives a to b of them."""

    start: int
    stop: int
    read: Callable[[int, int], Tensor]


@dataclass(frozen=True)
class Lying:
    """A tensor that lies somewhere in stretches, which together are all of it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stretches: Sequence[Stretch]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


Entries = Mapping[tuple[str, ...], Lying | bool | int | float]
"""By path, as in nested state dictionaries: ("optim", "state", "head.weight", "exp_avg")."""


def boxes(shape: Sequence[int], start: int, stop: int, most: int) -> Iterator[tuple[int, Box]]:
    """The stretch `start` to `stop` of a tensor as (first value, box), each of at most `most` values.

    Example: values 2 to 9 of a 3 x 4 are 2 to 3 of row 0, row 1, and 0 of row 2.
    """
    if not shape or not math.prod(shape):
        yield start, ((0,) * len(shape), tuple(shape))
        return
    inner = math.prod(shape[1:])
    while start < stop:
        row, skipped = divmod(start, inner)
        rows = min(stop - start, most) // inner
        if skipped or not rows:
            end = min(stop - row * inner, inner)
            for first, (offsets, sizes) in boxes(shape[1:], skipped, end, most):
                yield row * inner + first, ((row, *offsets), (1, *sizes))
            start = row * inner + end
        else:
            yield start, ((row, *(0 for _ in shape[1:])), (rows, *shape[1:]))
            start += rows * inner


def write_dcp(target: Path, entries: Entries, done: Callable[[int], None] = lambda _: None) -> None:
    """Write `entries` into the new folder `target`; `done(num_bytes)` is called for each part.

    Reads at most PART_BYTES at a time. Raises what a `read` or the disk raised; what is in `target` then is
    no checkpoint.
    """
    planner = _Planner(entries, done)
    writer = dcp.FileSystemWriter(target, overwrite=False, per_thread_copy_ahead=0)  # parts one by one
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process is what is wanted
        try:
            dcp.save({}, storage_writer=writer, planner=planner, no_dist=True)
        except dcp.CheckpointException as e:  # no Exception of Python's, and Ctrl-C is in it as well
            raise _first(e.failures[0][0]) from None


def _first(error: BaseException) -> BaseException:
    """What began it: a disk that is full is hidden behind what torch's archive says when it is closed."""
    found: BaseException | None = error
    while isinstance(found, RuntimeError):
        found = found.__context__
    return found if isinstance(found, OSError) else error


class _Planner(SavePlanner):
    """Tells torch's saver what there is, and gives it each part when it asks."""

    def __init__(self, entries: Entries, done: Callable[[int], None]) -> None:
        self._done = done
        self._paths = {".".join(path): path for path in entries}
        self._entries = {".".join(path): entry for path, entry in entries.items()}
        self._parts: dict[MetadataIndex, Callable[[], Tensor]] = {}
        self._at_hand = torch.empty(0)

    def set_up_planner(self, state_dict, storage_meta=None, is_coordinator: bool = False) -> None:
        pass

    def create_local_plan(self) -> SavePlan:
        items = []
        for name, entry in self._entries.items():
            if isinstance(entry, Lying):
                items += [self._item(name, entry, *part) for part in _parts(entry)]
            else:
                items.append(WriteItem(index=MetadataIndex(name), type=WriteItemType.BYTE_IO))
        return SavePlan(items)

    def create_global_plan(self, all_plans):
        plans, metadata = create_default_global_save_plan(all_plans)
        return plans, replace(metadata, planner_data=self._paths)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | BytesIO:
        if write_item.type != WriteItemType.BYTE_IO:
            # The saver asks when the part before is written, but holds on to it: its memory is taken away.
            self._at_hand.untyped_storage().resize_(0)
            self._at_hand = self._parts[write_item.index]().clone()
            self._done(self._at_hand.nbytes)
            return self._at_hand
        raw = BytesIO()
        torch.save(self._entries[write_item.index.fqn], raw)
        return raw

    def _item(self, name: str, entry: Lying, stretch: Stretch, first: int, box: Box) -> WriteItem:
        offsets, sizes = torch.Size(box[0]), torch.Size(box[1])
        index = MetadataIndex(name, offsets)
        start = first - stretch.start
        self._parts[index] = lambda: stretch.read(start, start + math.prod(sizes)).view(sizes)
        data = TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=offsets, sizes=sizes),
            properties=TensorProperties(dtype=entry.dtype),
            size=torch.Size(entry.shape),
        )
        return WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data)


def _parts(entry: Lying) -> Iterator[tuple[Stretch, int, Box]]:
    most = max(PART_BYTES // entry.dtype.itemsize, 1)
    for stretch in entry.stretches:
        for first, box in boxes(entry.shape, stretch.start, stretch.stop, most):
            yield stretch, first, box
