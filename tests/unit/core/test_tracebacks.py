import json

import pytest

from evener.core.tracebacks import last_line, misplaced, raised_in, user_line


class Part:
    def __init__(self, inner: "Part | None" = None) -> None:
        self.inner = inner

    def forward(self) -> None:
        if self.inner is None:
            raise RuntimeError("Expected all tensors to be on the same device")
        self.inner.forward()


def caught(part: Part) -> Exception:
    try:
        part.forward()
    except RuntimeError as e:
        return e
    raise AssertionError


def test_the_innermost_known_part_counts():
    inner, unknown = Part(), Part()
    outer = Part(Part(inner))
    names = {id(outer): "", id(outer.inner): "blocks", id(inner): "blocks.norm"}
    assert raised_in(caught(outer), names) == "blocks.norm"
    assert raised_in(caught(unknown), names) == ""


def test_a_remedy_for_tensors_left_behind():
    assert "register_buffer" in misplaced(caught(Part()), "other")
    assert misplaced(ValueError("shape"), "other") == "other"


def test_an_error_tells_the_innermost_line_of_the_users_own_code() -> None:
    def model() -> None:
        json.loads("{")  # fails inside the standard library

    with pytest.raises(ValueError) as failed:
        model()
    line = model.__code__.co_firstlineno + 1
    assert user_line(failed.value) == f"test_tracebacks.py:{line}"
    assert last_line(failed.value).endswith(f"(test_tracebacks.py:{line})")


def test_what_a_worker_tells_has_its_place_and_no_commands_for_a_terminal() -> None:
    told = (
        "Caught ValueError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
        '  File "/home/me/job.py", line 12, in __getitem__\n    raise ValueError()\n'
        '  File "/v/site-packages/torch/x.py", line 3, in f\nValueError: \x1b[31mtoo large'
    )
    assert last_line(ValueError(told)) == "ValueError: ValueError: \ufffd[31mtoo large (job.py:12)"
    assert last_line(ValueError("")) == "ValueError: no message"
