"""A file that is not what it should be: the remedy shows one that is."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evener.core.catalogue import FleetFile
from evener.core.figures import Value
from evener.core.files import EXAMPLES, check_target, decode, read, read_bytes, readable, write_bytes
from evener.core.fleet import Fleet
from evener.core.plan import Plan
from evener.core.profile import Profile
from evener.errors import FileError
from tests.architecture.source import ROOT


@pytest.mark.parametrize(
    ("shape", "example"),
    [
        (Fleet, "examples/fleets/8-4-2-2.json is one"),
        (FleetFile, "examples/fleets/8-4-2-2.json is one"),
        (Plan, "examples/plans/finetune.json is one"),
        (Profile, "evener profile writes one"),
    ],
)
def test_the_remedy_names_a_real_example(shape: type, example: str) -> None:
    with pytest.raises(FileError) as caught:
        decode(b'{"other": 1}', shape, "some.json")
    assert caught.value.remedy.endswith(f"; {example}")


def test_the_examples_are_there_and_valid() -> None:
    for name, shape in (("fleet", Fleet), ("plan", Plan)):
        assert read(ROOT / EXAMPLES[name].split()[0], shape)


def test_what_has_no_end_is_not_read_to_its_end(tmp_path: Path) -> None:
    """The size that a device tells is 0."""
    with pytest.raises(FileError, match="/dev/zero is larger than 1 KiB"):
        read_bytes("/dev/zero", 1024)
    (tmp_path / "right").write_bytes(b"x" * 1024)
    assert len(read_bytes(tmp_path / "right", 1024)) == 1024


def test_a_file_of_brackets_is_no_traceback() -> None:
    class Held(Value, frozen=True, kw_only=True):
        options: Any

    with pytest.raises(FileError, match="no valid held file"):
        decode(b'{"options": ' + b"[" * 100_000, Held, "held.json")


def test_a_mark_of_utf_8_is_passed_over_and_a_slip_has_its_line() -> None:
    raw = (ROOT / "examples/fleets/8-4-2-2.json").read_bytes()
    assert decode(b"\xef\xbb\xbf" + raw, FleetFile, "x").devices == decode(raw, FleetFile, "x").devices
    with pytest.raises(FileError, match=r"\(line 2, column 13\)"):
        decode(b'{\n"devices": [,]}', FleetFile, "x")


def test_where_nothing_can_be_written_is_told_before_the_work(tmp_path: Path) -> None:
    """`evener probe -o` measured for 17 s first."""
    check_target(None)
    check_target(tmp_path / "new" / "folder" / "fleet.json")
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").write_text("")
    check_target(tmp_path / "file")
    with pytest.raises(FileError, match="no regular file"):
        check_target(tmp_path)
    with pytest.raises(FileError, match=f"cannot write .*: {tmp_path}/file is no folder"):
        check_target(tmp_path / "file" / "fleet.json")


def test_a_name_that_is_too_long_is_no_traceback(tmp_path: Path) -> None:
    for path in (tmp_path / ("a" * 300), tmp_path / ("a" * 300) / "plan.json"):
        with pytest.raises(FileError, match=r"cannot write .*: File name too long"):
            check_target(path)
        with pytest.raises(FileError, match=r"cannot write .*: File name too long"):
            write_bytes(path, b"")


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.usefixtures("umask")
@pytest.mark.parametrize("is_linux", [True, False])
@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_who_may_read_a_file_is_the_umask_s_to_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mask: int, mode: int, is_linux: bool
) -> None:
    """Weights were readable by all on a shared host, whatever their owner had set."""
    if not is_linux:
        monkeypatch.setattr(Path, "read_bytes", lambda self: b"Name:\tpython\n")
    os.umask(mask)
    write_bytes(tmp_path / "new", b"1")
    (tmp_path / "other").touch(0o600)
    readable(tmp_path / "other")
    assert [p.stat().st_mode & 0o777 for p in sorted(tmp_path.iterdir())] == [mode, mode]
    assert os.umask(mask) == mask
