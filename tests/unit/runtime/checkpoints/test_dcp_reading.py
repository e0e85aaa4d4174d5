"""Checkpoints of torch.distributed.checkpoint are read, and nothing in them runs, whatever they hold."""

import io
import os
import pickle
import struct
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

from evener.errors import FileError, StateError
from evener.runtime.checkpoints import dcp_reading
from evener.runtime.checkpoints.dcp_reading import (
    METADATA,
    read_metadata,
    read_number,
    read_part,
    read_tensor,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
STATE: dict[str, Any] = {
    "w": torch.arange(12.0).view(3, 4),
    "half": torch.randn(2, 3, 1).bfloat16(),
    "step": torch.tensor(4),
    "empty": torch.zeros(0, 2),
    "count": 3,
    "rate": 0.5,
    "words": ["a", "b"],
}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    dcp.save(dict(STATE), checkpoint_id=tmp_path / "dcp", no_dist=True)
    return tmp_path / "dcp"


def test_what_torch_saved_is_read_as_it_was(saved: Path) -> None:
    """The names of classes in torch's own metadata are those that are admitted, in this torch."""
    found = read_metadata(saved)
    assert set(found) == set(STATE)
    for name, value in STATE.items():
        if isinstance(value, Tensor):
            entry = found[name]
            assert (entry.dtype, entry.shape) == (value.dtype, tuple(value.shape))
            assert entry.num_bytes == value.nbytes and torch.equal(read_tensor(saved, entry), value)
    assert read_number(saved, found["count"]) == 3 and read_number(saved, found["rate"]) == 0.5
    with pytest.raises(StateError, match="damaged"):
        read_number(saved, found["words"])


class Evil:
    def __init__(self, call: Any, *args: Any) -> None:
        self.made = call, args

    def __reduce__(self) -> Any:
        return self.made


def changed(saved: Path, change: Any) -> None:
    """The metadata, as `change` leaves it."""
    path = saved / METADATA
    metadata = pickle.loads(path.read_bytes())
    result = change(metadata)
    path.write_bytes(pickle.dumps(result if result is not None else metadata))


@pytest.mark.parametrize(
    "evil",
    [
        Evil(os.system, "touch here"),
        Evil(getattr, "a", "upper"),
        Evil(eval, "1"),
        Evil(torch.load, "x"),
        Evil(io.open, "here", "w"),
        Evil(replace, Metadata({})),
    ],
    ids=lambda e: e.made[0].__name__,
)
def test_a_pickle_that_names_anything_else_is_refused_and_runs_nothing(
    saved: Path, evil: Evil, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(saved)

    def put(metadata: Metadata) -> None:
        metadata.planner_data = {"x": evil}

    changed(saved, put)
    with pytest.raises(StateError, match="not admitted") as e:
        read_metadata(saved)
    assert "it names" in e.value.numbers and not Path("here").exists()
    (saved / METADATA).write_bytes(pickle.dumps(evil))
    with pytest.raises(StateError, match="not admitted"):
        read_metadata(saved)
    assert not Path("here").exists()


def test_dotted_names_do_not_reach_through_what_is_admitted(saved: Path) -> None:
    module, name = b"torch.distributed.checkpoint.metadata", b"Metadata.__init__.__globals__"
    short = b"\x8c" + bytes([len(module)]) + module + b"\x8c" + bytes([len(name)]) + name
    (saved / METADATA).write_bytes(b"\x80\x04" + short + b"\x93.")
    with pytest.raises(StateError, match="not admitted"):
        read_metadata(saved)


def _elsewhere(metadata: Any, path: str) -> None:
    for info in metadata.storage_data.values():
        info.relative_path = path


def _beyond(metadata: Any) -> None:
    for info in metadata.storage_data.values():
        info.length = 10**9


def _negative(metadata: Any) -> None:
    metadata.state_dict_metadata["w"].size = torch.Size((3, -4))


def _gap(metadata: Any) -> None:
    metadata.state_dict_metadata["w"].size = torch.Size((4, 4))


def _compressed(metadata: Any) -> None:
    for info in metadata.storage_data.values():
        info.transform_descriptors = ["zstd"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: _elsewhere(m, "../secret"), "outside"),
        (lambda m: _elsewhere(m, "/etc/passwd"), "outside"),
        (lambda m: _elsewhere(m, ".."), "missing"),
        (lambda m: _elsewhere(m, "__9_9.distcp"), "missing"),
        (lambda m: _elsewhere(m, 3), "outside"),
        (_beyond, "truncated"),
        (_negative, "shape"),
        (_gap, "missing"),
        (_compressed, "transformed"),
        (lambda m: {"a": 1}, "something else"),
        (lambda m: setattr(m, "storage_data", None), ""),
        (lambda m: m.state_dict_metadata.update({"x\x1b[2J": m.state_dict_metadata["w"]}), "line of text"),
        (lambda m: m.state_dict_metadata.update({"other": m.state_dict_metadata["w"]}), "other"),
    ],
)
def test_metadata_that_is_wrong_is_refused(saved: Path, change: Any, words: str) -> None:
    changed(saved, change)
    with pytest.raises(StateError) as e:
        read_metadata(saved)
    assert words in e.value.numbers


def test_metadata_and_its_files_are_bounded(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (saved / "link").symlink_to(saved / "__0_0.distcp")
    changed(saved, lambda m: _elsewhere(m, "link"))
    with pytest.raises(StateError):
        read_metadata(saved)
    monkeypatch.setattr(dcp_reading, "MOST_BYTES", 100)
    with pytest.raises(FileError, match="larger"):
        read_metadata(saved)
    (saved / METADATA).write_bytes(b"\x80")
    with pytest.raises(StateError):
        read_metadata(saved)


SIZE = b"\x8c\x05torch\x8c\x04Size\x93"
PART = b"\x8c\x25torch.distributed.checkpoint.metadata\x8c\x0bStorageMeta\x93"
TWICE = b"".join(b"h%ch%c\x86\x94" % (n, n) for n in range(60))  # each holds the last twice


def integers(count: int) -> bytes:
    """A dict of integers that all have the hash 0."""
    keys = (pickle.dumps(n * (2**61 - 1), 2)[2:-1] for n in range(count))
    return b"\x80\x04}(" + b"".join(key + b"N" for key in keys) + b"u."


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"\x80\x04])\x94" + TWICE + b"}h\x3cK\x01s.", "a key is neither text nor an object"),
        (b"\x80\x04)\x94}(h\x00K\x01u.", "a key is neither"),
        (b"\x80\x04})" + b"2\x86" * 60 + b"K\x01s.", "the opcode DUP"),
        (b"\x80\x04)" + b"2\x86Nb" * 60 + b"\x94}h\x00K\x01s.", "the opcode DUP"),
        (b"\x80\x04)\x94" + b"h\x00Nb\x85\x94}h\x01K\x01s.", "a key is neither"),
        (b"\x80\x02})q\x000" + b"ctorch\nSize\nh\x00h\x00\x86\x85Rq\x000" * 60 + b"h\x00K\x01s.", "BINPUT"),
        (b"\x80\x04" + b"K\x01" * 60 + b")" + b"(02\x86" * 60 + b"\x94}h\x00K\x01s.", "the opcode POP"),
        (b"\x80\x04}(K\x07\x91K\x01s.", "the opcode FROZENSET"),
        (b"\x80\x04})" + b"\x85" * 200_000 + b"K\x01s.", "a key is neither"),
        (integers(1000), "a key is neither"),
        (b"\x80\x04(" + b"N" * 1001 + b"t.", "a tuple of 1001 values, more than 1000"),
        (b"\x80\x04X\x01\x10\x00\x00" + b"a" * 4097 + b".", "a text of 4097 characters, more than 4096"),
        (b"\x80\x04}r\xff\xff\xff\x7f.", "the opcode LONG_BINPUT"),
        (b"\x80\x04\x86.", "it takes more than there is"),
        (b"\x80\x04N(\x85.", "it takes more than there is"),
        (b"\x80\x04t.", "it takes more than there is"),
        (b"\x80\x04" + b"N" * 200 + b".", "more than 150 opcodes in 203 bytes"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_no_pickle_hangs_the_one_who_reads_it(
    saved: Path, raw: bytes, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As keys of dicts, tuples within tuples are hashed or compared in 2^depth steps."""
    if "150 opcodes" in words:
        monkeypatch.setattr(dcp_reading, "MOST_OPCODES", 150)
    (saved / METADATA).write_bytes(raw)
    with pytest.raises(StateError, match=words):
        read_metadata(saved)


def test_what_size_makes_is_no_tuple_and_may_be_a_key(saved: Path) -> None:
    """Its hash is that of an object: 60 deep it is made at once. It holds something else all the same."""
    deep = b"".join(SIZE + b"h%ch%c\x86\x85R\x94" % (n, n) for n in range(60))
    (saved / METADATA).write_bytes(b"\x80\x04}])\x94" + deep + b"}h\x3cK\x01s.")
    with pytest.raises(StateError, match="something else"):
        read_metadata(saved)


def test_things_within_things_end_too(saved: Path) -> None:
    """A stack of C's is not used up by taking them apart: lists, tuples, our own objects."""
    objects = b"".join(b"\x94h\x00)\x81j" + struct.pack("<I", n + 1) + b"b" for n in range(50_000))
    for raw in (b"N" + b"\x85" * 100_000, b"]" * 100_000 + b"a" * 99_999, PART + b"\x94N" + objects):
        (saved / METADATA).write_bytes(b"\x80\x04" + raw + b".")
        with pytest.raises(StateError, match="something else"):
            read_metadata(saved)


def test_one_list_of_parts_is_not_had_by_many_tensors(saved: Path) -> None:
    """A million of each are 2 MB, and would be read a million million times."""
    path = saved / METADATA
    metadata = pickle.loads(path.read_bytes())
    entries = metadata.state_dict_metadata
    (place,) = (x for i, x in metadata.storage_data.items() if i.fqn == "empty")
    entries["empty"].chunks *= 20
    for n in range(20):
        entries[f"empty{n}"] = entries["empty"]
        metadata.storage_data[MetadataIndex(f"empty{n}", torch.Size([0, 0]))] = place
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(StateError, match="more parts of tensors than places"):
        read_metadata(saved)


def test_parts_are_checked_when_they_are_read(saved: Path) -> None:
    def twice(metadata: Any) -> None:
        """Two parts over the same two columns, which have as many values as the tensor."""
        entry, where = metadata.state_dict_metadata["half"], metadata.storage_data
        entry.size = torch.Size((2, 3, 2))
        entry.chunks.append(ChunkStorageMetadata(torch.Size((0, 0, 0)), torch.Size((2, 3, 1))))
        where[MetadataIndex("half", (0, 0, 0))] = where[MetadataIndex("half", (0, 0, 0))]

    changed(saved, twice)
    with pytest.raises(StateError, match="overlap"):
        read_tensor(saved, read_metadata(saved)["half"])
    entry = read_metadata(saved)["w"]
    with pytest.raises(StateError, match="damaged"):
        read_tensor(saved, replace(entry, dtype=torch.int32))
    file = saved / "__0_0.distcp"
    raw = file.read_bytes()
    for start in (entry.parts[0].start, entry.parts[0].start + entry.parts[0].length - 30):
        file.write_bytes(raw[:start] + b"xxxxxxxx" + raw[start + 8 :])
        with pytest.raises(StateError, match="damaged"):
            read_part(saved, entry, entry.parts[0])


def test_what_is_compressed_is_not_unpacked(saved: Path) -> None:
    entry = read_metadata(saved)["w"]
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w", zipfile.ZIP_DEFLATED) as z:
        z.writestr("archive/data/0", b"\0" * 10**6)
    (saved / "__0_0.distcp").write_bytes(raw.getvalue())
    part = replace(entry.parts[0], start=0, length=len(raw.getvalue()))
    with pytest.raises(StateError, match="damaged") as e:
        read_part(saved, entry, part)
    assert "compressed" in str(e.value.__cause__)


def test_the_values_that_follow_each_other() -> None:
    part = dcp_reading.Part(file="f", start=0, length=9)
    rows = replace(part, offsets=(2, 0), sizes=(2, 3))
    assert rows.stretch_in((5, 3)) == (6, 12)
    assert replace(part, offsets=(0, 1), sizes=(5, 1)).stretch_in((5, 3)) is None
    assert replace(part, offsets=(4, 1), sizes=(1, 2)).stretch_in((5, 3)) == (13, 15)
    assert replace(part, offsets=(4, 1), sizes=(1, 1)).stretch_in((5, 3)) == (13, 14)
    assert part.stretch_in(()) == (0, 1)
