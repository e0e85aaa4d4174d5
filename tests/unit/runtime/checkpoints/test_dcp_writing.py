"""State that is cut anywhere becomes a checkpoint of torch.distributed.checkpoint, which torch reads."""

import contextlib
import errno
import io
import itertools
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from evener.errors import StateError
from evener.runtime.checkpoints import dcp_writing
from evener.runtime.checkpoints.dcp_writing import Lying, Stretch, boxes, write_dcp

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def lying(tensor: torch.Tensor, *edges: int) -> Lying:
    values = tensor.reshape(-1)
    ends = [0, *edges, len(values)]
    stretches = [
        Stretch(a, b, lambda start, stop, a=a: values[a + start : a + stop])
        for a, b in itertools.pairwise(ends)
    ]
    return Lying(tensor.dtype, tuple(tensor.shape), stretches)


def test_boxes_are_the_stretch_in_order_and_none_is_too_large() -> None:
    assert list(boxes((3, 4), 2, 9, 99)) == [
        (2, ((0, 2), (1, 2))),
        (4, ((1, 0), (1, 4))),
        (8, ((2, 0), (1, 1))),
    ]
    rng = random.Random(0)
    for _ in range(200):
        shape = [rng.randint(1, 5) for _ in range(rng.randint(1, 4))]
        values = torch.arange(math.prod(shape)).view(shape)
        start, most = rng.randrange(values.numel()), rng.randint(1, 9)
        stop = rng.randint(start + 1, values.numel())
        found = []
        for first, (offsets, sizes) in boxes(shape, start, stop, most):
            box = values[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))].flatten()
            assert 0 < len(box) <= most and box[0] == first
            found += box.tolist()
        assert found == list(range(start, stop))


def test_torch_reads_what_was_cut_and_it_lies_in_no_memory_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dcp_writing, "PART_BYTES", 40)
    state = {
        "weight": torch.randn(10, 4),
        "half": torch.randn(3, 2, 5).bfloat16(),
        "empty": torch.zeros(0, 4),
        "step": torch.tensor(3.0),
    }
    entries = {("model", name): lying(tensor) for name, tensor in state.items()}
    entries["model", "weight"] = lying(state["weight"], 21, 30)
    entries["optim", "state", "weight", "count"] = 7
    moved: list[int] = []
    write_dcp(tmp_path / "to", entries, moved.append)
    assert sum(moved) == sum(t.nbytes for t in state.values()) and max(moved) <= 40
    found = {"model": {name: torch.full_like(t, 9) for name, t in state.items()}}
    dcp.load(found, checkpoint_id=tmp_path / "to", no_dist=True)
    assert all(torch.equal(found["model"][name], tensor) for name, tensor in state.items())
    dcp_to_torch_save(tmp_path / "to", tmp_path / "file.pt")
    nested = torch.load(tmp_path / "file.pt", weights_only=True)
    assert torch.equal(nested["model"]["half"], state["half"])
    assert nested["optim"]["state"]["weight"]["count"] == 7


@pytest.mark.parametrize("error", [StateError("damaged"), OSError("no room"), KeyboardInterrupt()])
def test_what_goes_wrong_while_reading_comes_out_as_it_is(tmp_path: Path, error: BaseException) -> None:
    def read(start: int, stop: int) -> torch.Tensor:
        raise error

    with pytest.raises(type(error)):
        write_dcp(tmp_path / "to", {("a",): Lying(torch.float32, (2,), [Stretch(0, 2, read)])})
    assert not (tmp_path / "to" / ".metadata").exists()


def test_a_full_disk_is_called_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's archive, closed half-written, speaks of positions."""

    class Full(io.BytesIO):
        def write(self, data: Any) -> int:
            if self.tell() > 3000:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(data)

    stream = contextlib.nullcontext(Full())
    monkeypatch.setattr(dcp.filesystem.FileSystem, "create_stream", lambda *_: stream)
    with pytest.raises(OSError, match="No space left"):
        write_dcp(tmp_path / "to", {("a",): lying(torch.randn(4000))})
