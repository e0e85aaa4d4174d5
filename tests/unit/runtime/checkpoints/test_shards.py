"""A shard is an ordinary safetensors file: the library, and torch's own reader, see what was written."""

import hashlib
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageReader

from evener.errors import ModelError, StateError
from evener.runtime.checkpoints.files import Disk
from evener.runtime.checkpoints.shards import DTYPES, check_shard, read_shard, write_shard
from tests.checkpoints import save, tensors_at

FILE = "shard-00001-of-00001.safetensors"


def some_tensors() -> dict[str, torch.Tensor]:
    """One of each dtype, of odd sizes; no dimensions, no elements, strange names."""
    made = {str(d): torch.arange(5).to(torch.float32).to(d) for d in DTYPES}
    made |= {"scalar": torch.tensor(1.5), "empty": torch.zeros(0, 3), '../../etc/x\n"é': torch.ones(3)}
    return made | {"large": torch.arange(3_000_000, dtype=torch.float32)}


def test_the_library_reads_what_was_written(tmp_path: Path) -> None:
    tensors = some_tensors()
    shard = write_shard(Disk(), tmp_path / FILE, tensors, "lab/a")
    raw = (tmp_path / FILE).read_bytes()
    assert shard.num_bytes == len(raw) and shard.sha256 == hashlib.sha256(raw).hexdigest()
    found = load_file(tmp_path / FILE)
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert torch.equal(
            found[name].view(torch.uint8) if tensor.dim() else found[name],
            tensor.view(torch.uint8) if tensor.dim() else tensor,
        )
    with safe_open(tmp_path / FILE, framework="pt") as f:
        assert f.metadata() == {"format": "pt"}
    assert sorted(p.name for p in tmp_path.iterdir()) == [FILE]  # no name is ever a path
    check_shard(tmp_path, shard)
    assert set(read_shard(tmp_path, shard, ["scalar", "empty"])) == {"scalar", "empty"}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torchs_own_reader_reads_a_checkpoint(tmp_path: Path) -> None:
    """torch.distributed.checkpoint, in one process, from what two devices wrote."""
    path = save(tmp_path, 8).path
    held = {n: t for tensors in tensors_at(8).values() for n, t in tensors.items()}
    state = {name: torch.zeros_like(t) for name, t in held.items()}
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)
    assert all(torch.equal(state[n], held[n]) for n in held)


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (lambda raw: raw[:-1], "truncated"),
        (lambda raw: raw + b"x", "too long"),
        (lambda raw: raw[:-3] + bytes([raw[-3] ^ 4]) + raw[-2:], "checksum"),
        (lambda raw: bytes([raw[0] ^ 1]) + raw[1:], "checksum"),
        (lambda raw: b"", "truncated"),
    ],
)
def test_damage_is_found(tmp_path: Path, harm, says: str) -> None:
    shard = write_shard(Disk(), tmp_path / FILE, {"a": torch.ones(9)}, "lab/a")
    (tmp_path / FILE).write_bytes(harm((tmp_path / FILE).read_bytes()))
    with pytest.raises(StateError, match=says) as e:
        check_shard(tmp_path, shard)
    assert FILE in e.value.what and e.value.code == "EV104"


def test_every_flipped_bit_of_a_small_shard_is_found(tmp_path: Path) -> None:
    shard = write_shard(Disk(), tmp_path / FILE, {"a": torch.ones(2)}, "lab/a")
    raw = (tmp_path / FILE).read_bytes()
    for bit in range(len(raw) * 8):
        flipped = bytearray(raw)
        flipped[bit // 8] ^= 1 << bit % 8
        (tmp_path / FILE).write_bytes(flipped)
        with pytest.raises(StateError):
            check_shard(tmp_path, shard)


def test_a_link_in_place_of_a_shard_is_not_followed(tmp_path: Path) -> None:
    shard = write_shard(Disk(), tmp_path / FILE, {"a": torch.ones(2)}, "lab/a")
    (tmp_path / FILE).rename(tmp_path / "elsewhere")
    (tmp_path / FILE).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StateError, match="missing"):
        check_shard(tmp_path, shard)


def test_what_a_file_cannot_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="sparse"):
        write_shard(Disk(), tmp_path / FILE, {"a": torch.eye(2).to_sparse()}, "lab/a")
