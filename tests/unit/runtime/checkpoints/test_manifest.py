"""A manifest says what it is; damaged, foreign, newer and tricky ones are refused by name."""

import json
from pathlib import Path

import msgspec
import pytest

from evener.errors import StateError
from evener.runtime.checkpoints.manifest import MANIFEST, TensorInfo, model_id, read_manifest, sealed
from tests.checkpoints import manifest_at, save


def write(folder: Path, **changes: object) -> Path:
    """A manifest with another content and a right checksum, as an attacker would make it."""
    manifest = msgspec.structs.replace(read_manifest(folder), **changes)
    (folder / MANIFEST).write_bytes(sealed(manifest))
    return folder


def test_it_reads_what_was_written(tmp_path: Path) -> None:
    manifest = read_manifest(save(tmp_path, 16).path)
    assert manifest.position.samples_seen == 16 and manifest.number == 1
    assert manifest.tensors["model/b"] == TensorInfo(dtype="F64", shape=(2,))
    assert manifest.num_bytes == sum(s.num_bytes for s in manifest.shards) > 0
    assert msgspec.structs.replace(manifest, shards=(), number=0, sha256="") == manifest_at(16)


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    folder = save(tmp_path, 8).path
    raw = (folder / MANIFEST).read_bytes()
    for place in range(0, len(raw) * 8, 5):
        flipped = bytearray(raw)
        flipped[place // 8] ^= 1 << place % 8
        (folder / MANIFEST).write_bytes(flipped)
        with pytest.raises(StateError):
            read_manifest(folder)


def test_a_newer_format_is_named_before_anything_else_is_read(tmp_path: Path) -> None:
    folder = save(tmp_path, 8).path
    (folder / MANIFEST).write_text(json.dumps({"format": 7, "quite": "another"}))
    with pytest.raises(StateError, match="newer evener") as e:
        read_manifest(folder)
    assert "format 7; this version reads up to 1" in e.value.numbers


@pytest.mark.parametrize(
    "file", ["../../etc/passwd", "/etc/passwd", "shard-00001-of-00002.safetensors/..", "x"]
)
def test_a_path_as_the_name_of_a_shard_is_refused(tmp_path: Path, file: str) -> None:
    folder = save(tmp_path, 8).path
    first, *rest = read_manifest(folder).shards
    write(folder, shards=(msgspec.structs.replace(first, file=file), *rest))
    with pytest.raises(StateError, match="no name of a shard"):
        read_manifest(folder)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path, 8).path
    first, second = read_manifest(folder).shards
    write(folder, shards=(first, msgspec.structs.replace(second, tensors=first.tensors)))
    with pytest.raises(StateError, match="model/w is in shard-00001"):
        read_manifest(folder)


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'{"format": 1}', b"\xff\xfe", b'{"format": "1"}'])
def test_what_is_no_manifest_is_damaged(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / MANIFEST).write_bytes(raw)
    with pytest.raises(StateError, match="damaged"):
        read_manifest(tmp_path)


def test_the_models_identity_is_names_shapes_and_dtypes() -> None:
    tensors = {
        "model/a": TensorInfo(dtype="F32", shape=(2, 3)),
        "optimizer/a/x": TensorInfo(dtype="F32", shape=()),
    }
    same = {"optimizer/a/y": TensorInfo(dtype="F64", shape=(1,)), "model/a": tensors["model/a"]}
    assert model_id(tensors) == model_id(same)
    for other in (TensorInfo(dtype="F32", shape=(3, 2)), TensorInfo(dtype="F64", shape=(2, 3))):
        assert model_id({"model/a": other}) != model_id(tensors)
