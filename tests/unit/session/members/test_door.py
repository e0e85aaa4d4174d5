"""The token of a job's door: in a run folder that may not be there yet, for its owner alone."""

from pathlib import Path

import pytest

from evener.errors import FileError
from evener.session.members.door import TOKEN_FILE, new_token, read_token


def test_a_token_makes_the_run_folder_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "first"
    token = new_token(folder)
    assert read_token(folder / TOKEN_FILE) == token
    assert (folder / TOKEN_FILE).stat().st_mode & 0o077 == 0


def test_every_start_has_a_token_of_its_own(tmp_path: Path) -> None:
    first, second = new_token(tmp_path), new_token(tmp_path)
    assert first != second and read_token(tmp_path / TOKEN_FILE) == second


def test_a_missing_token_is_told_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="nowhere"):
        read_token(tmp_path / "nowhere")
