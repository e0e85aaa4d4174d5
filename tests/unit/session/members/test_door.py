"""The token of a job's door: in a run folder that may not be there yet, for its owner alone."""

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from evener.core.fleet import Device, Fleet
from evener.errors import FileError, RefusedError
from evener.session.members import door as door_module
from evener.session.members.door import TOKEN_FILE, Door, Welcome, knock, new_token, read_token
from evener.session.request import Request


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


WELCOME = Welcome(
    store_host="127.0.0.1",
    store_port=1,
    request=Request(fleet=Fleet(devices=(Device(name="lab/a", kind="k", type="cpu"),)), run_dir="."),
)


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def door(told: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Door]:
    monkeypatch.setattr(door_module, "PENALTY_S", 0.0)
    opened = Door("the token of this job", WELCOME, told.append)
    yield opened
    opened.close()


def say(port: int, what: bytes) -> bytes:
    """What the door answers to a line; empty where it hangs up."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as guest:
        guest.makefile("rb").readline()
        guest.sendall(what + b"\n")
        return guest.makefile("rb").readline()


@pytest.mark.parametrize(
    "what",
    [b"[" * 200_000, b'{"nonce": "b", "proof": "\\ud800"}', '{"nonce": "b", "proof": "ä"}'.encode(), b"7"],
    ids=["nested", "surrogate", "not ASCII", "a number"],
)
def test_a_stranger_who_talks_nonsense_ends_no_door(door: Door, told: list[str], what: bytes) -> None:
    """A line of brackets once ended the door's thread, and nobody could join any more."""
    assert b"welcome" not in say(door.port, what)
    assert len(told) == 1
    assert knock("127.0.0.1", door.port, "the token of this job") == WELCOME
    with pytest.raises(RefusedError, match="not that of this job"):
        knock("127.0.0.1", door.port, "another token")


def test_a_closed_door_listens_no_more_and_its_thread_ends(door: Door) -> None:
    """Closing a socket does not wake who waits in it: the port went on letting one more in."""
    door.close()
    door._thread.join(10)
    assert not door._thread.is_alive()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", door.port), timeout=10)


def test_who_answers_in_a_jobs_place_and_cannot_prove_it_is_refused() -> None:
    """A proof that is no ASCII was an unexpected error instead."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        answers = [{"nonce": "a"}, {"proof": "ä", "welcome": "{}"}]

        def answer() -> None:
            guest, _ = listener.accept()
            with guest:
                guest.sendall(b"".join(json.dumps(a).encode() + b"\n" for a in answers[:1]))
                guest.makefile("rb").readline()
                guest.sendall(json.dumps(answers[1]).encode() + b"\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(RefusedError, match="does not know this token"):
            knock("127.0.0.1", port, "a token")
        thread.join(10)
