"""A sign of life while something takes long."""

import threading

import pytest

from evener.core.tell import waiting


def test_what_takes_long_says_so_and_what_does_not_is_silent(capfd: pytest.CaptureFixture[str]) -> None:
    with waiting("still at it", 60.0):
        pass
    assert capfd.readouterr().err == ""
    seen = ""
    with waiting("still at it", 0.01):
        while "so far" not in seen:
            threading.Event().wait(0.005)
            seen += capfd.readouterr().err
    assert seen.startswith("evener: still at it, 0 s so far\n")
