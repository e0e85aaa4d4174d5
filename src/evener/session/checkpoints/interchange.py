"""Checkpoints for and from `torch.distributed.checkpoint` (DCP), which FSDP2, torchtitan and Lightning write.

    evener                                     DCP, as torch's get_state_dict names it
    model/head.weight                          model.head.weight
    optimizer/head.weight/exp_avg              optim.state.head.weight.exp_avg
    position, rng/…, statistics/…, outer/…     nothing
    nothing                                    optim.param_groups…, lr_scheduler…, dataloader…

`to_dcp` and `from_dcp` are the two ways; here is what both need.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

from evener.core.figures import Value
from evener.core.words import in_bytes
from evener.errors import FileError

Done = Callable[[int, int], None]
"""(bytes moved, bytes in all)."""

NUMBERS = {"bool": torch.bool, "int": torch.int64, "float": torch.float64}
"""How `runtime.state` keeps an optimiser's numbers, by the last word of their names."""

ROOM = "a folder with room that you may write to"
_PER_PART_BYTES = 4096  # what is written beside the values of one


class Moved(Value, frozen=True, kw_only=True):
    """What was exported or imported: so many tensors and bytes; `left` names what was not.

    `note` is what could not be known.
    """

    source: str
    to: str
    num_tensors: int
    num_bytes: int
    left: tuple[str, ...] = ()
    note: str = ""

    def as_json(self) -> dict[str, Any]:
        """The same for a program, with `from` as other exports have it."""
        fields = msgspec.to_builtins(self)
        return {"from": fields.pop("source")} | fields


def adding(done: Done, total: int) -> Callable[[int], None]:
    """`done` for who only knows of each part how large it is."""
    moved = 0

    def add(num_bytes: int) -> None:
        nonlocal moved
        moved += num_bytes
        done(moved, total)

    return add


def check_room(folder: Path, num_bytes: int, num_parts: int) -> None:
    """FileError where the disk of `folder` has no room for so much in so many parts."""
    needed, free = num_bytes + num_parts * _PER_PART_BYTES, shutil.disk_usage(folder).free
    if free < needed:
        raise FileError(
            f"{folder} has too little room",
            numbers=f"{in_bytes(needed)} needed, {in_bytes(free)} free",
            remedy=ROOM,
        )
