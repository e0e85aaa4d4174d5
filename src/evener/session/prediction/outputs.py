"""A model's outputs, kept where the last stages are and put in the order of the samples on one device."""

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from evener.core.figures import Value
from evener.core.files import readable
from evener.errors import FileError, ModelError, UsageError
from evener.runtime.channels.channel import open_channel
from evener.runtime.ranks import Ranks
from evener.session.address import address_here
from evener.session.meeting import Meeting

OUTPUT = "output"


class Keeper:
    """Stands in the place of the loss and keeps the outputs; `loss` is computed too where there is one."""

    def __init__(self, loss: Callable[[Any, Any], Any] | None) -> None:
        self._loss = loss
        self._ranges: deque[tuple[int, int]] = deque()
        self.pieces: list[tuple[tuple[int, int], dict[str, Tensor]]] = []
        self.left_out: set[str] = set()

    def expect(self, ranges: Sequence[tuple[int, int]]) -> None:
        """The next outputs are those of these samples, half-open ranges of the dataset."""
        self._ranges.extend(ranges)

    def __call__(self, output: Any, target: Any) -> Any:
        first, last = self._ranges.popleft()
        kept = {}
        for name, value in _named(output):
            if isinstance(value, Tensor) and value.dim() and value.shape[0] == last - first:
                kept[name] = value.detach().to("cpu", copy=True)
            elif value is not None:
                self.left_out.add(name)
        self.pieces.append(((first, last), kept))
        return torch.zeros(()) if self._loss is None else self._loss(output, target)


def _named(output: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every value in a model's output with its name. Example: {"a": x, "b": (y, z)} has a, b.0 and b.1."""
    if isinstance(output, Mapping):
        for key, value in output.items():
            yield from _named(value, f"{name}.{key}" if name else str(key))
    elif isinstance(output, list | tuple):
        fields = getattr(output, "_fields", range(len(output)))
        for key, value in zip(fields, output, strict=True):
            yield from _named(value, f"{name}.{key}" if name else str(key))
    else:
        yield name or OUTPUT, output


class _Told(Value, frozen=True, kw_only=True):
    """What a device has: ranges of samples, the names of the tensors of each, and what was left out."""

    ranges: tuple[tuple[int, int], ...]
    names: tuple[tuple[str, ...], ...]
    left_out: tuple[str, ...]


def gathered(keeper: Keeper, ranks: Ranks, room: Meeting) -> tuple[dict[str, Tensor], set[str]] | None:
    """All outputs on the leading device, in order, and the names of what was left out; None elsewhere.

    They travel as what crosses a cut does. ModelError for outputs that cannot be put in one order.
    """
    told = _Told(
        ranges=tuple(r for r, _ in keeper.pieces),
        names=tuple(tuple(tensors) for _, tensors in keeper.pieces),
        left_out=tuple(sorted(keeper.left_out)),
    )
    pieces, left_out = list(keeper.pieces), set(keeper.left_out)
    if ranks.world_size > 1:
        store = dist.PrefixStore("outputs", room.store)
        channel = open_channel(ranks, store, host=address_here(os.environ))
        room.put(f"told/{ranks.here}", told)
        leader = ranks.devices[0]
        if ranks.rank:
            sent = [
                channel.send(tuple(tensors.values()), leader, f"outputs {i}")
                for i, (_, tensors) in enumerate(keeper.pieces)
            ]
            for pending in sent:
                pending.wait()
        else:
            for device in ranks.devices[1:]:
                theirs = room.get(f"told/{device}", _Told)
                left_out.update(theirs.left_out)
                for i, (range_, names) in enumerate(zip(theirs.ranges, theirs.names, strict=True)):
                    came = channel.receive(device, f"outputs {i}", device=torch.device("cpu")).wait()
                    pieces.append((range_, dict(zip(names, came, strict=True))))
            room.put("all came", True)
        room.get("all came", bool)  # what was sent is lost with a channel that closes
        channel.close()
    if ranks.rank:
        return None
    return _in_order(pieces), left_out


def _in_order(pieces: list[tuple[tuple[int, int], dict[str, Tensor]]]) -> dict[str, Tensor]:
    pieces = sorted(pieces, key=lambda piece: piece[0])
    names = list(pieces[0][1])
    if any(list(tensors) != names for _, tensors in pieces) or not names:
        kinds = sorted({str(list(tensors)) for _, tensors in pieces})
        raise ModelError(
            "the model's outputs cannot be put together", numbers=f"tensors by sample: {' and '.join(kinds)}"
        )
    outputs = {}
    for name in names:
        column = [tensors[name] for _, tensors in pieces]
        shapes = {tuple(t.shape[1:]) for t in column}
        if len(shapes) > 1:
            raise ModelError(
                f"the outputs {name!r} of different batches have different shapes",
                numbers=f"beyond the samples: {' and '.join(map(str, sorted(shapes)))}",
                remedy="collate= in the recipe that pads every batch to one length",
            )
        outputs[name] = torch.cat(column)
    return outputs


def write_outputs(path: Path, outputs: Mapping[str, Tensor]) -> None:
    """Write tensors by name as safetensors or npz, as the name of `path` says: whole or not at all."""
    part = path.with_name(f".{path.name}.part{path.suffix}")  # savez gives a name without .npz one
    try:
        if path.suffix == ".npz":
            lacking = [n for n, t in outputs.items() if t.dtype == torch.bfloat16]
            if lacking:
                raise UsageError(
                    f"npz knows no bfloat16, which {', '.join(lacking)} is", remedy="a .safetensors file"
                )
            np.savez(part, **{n: t.numpy() for n, t in outputs.items()})  # type: ignore[arg-type]
        else:
            save_file({n: t.contiguous() for n, t in outputs.items()}, part)
        readable(part)
        os.replace(part, path)
    except (OSError, SafetensorError) as e:
        raise FileError(f"cannot write {path}: {e}", remedy="a folder with room that you may write to") from e
    finally:
        part.unlink(missing_ok=True)
