"""HOST:PORT, and what is none."""

import pytest

from evener.core.addresses import host_and_port
from evener.errors import UsageError


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("lab1:4711", ("lab1", 4711)),
        ("127.0.0.1:0", ("127.0.0.1", 0)),
        ("[::1]:80", ("::1", 80)),
        ("h:65535", ("h", 65535)),
    ],
)
def test_an_address_has_a_host_and_a_port(text: str, parts: tuple[str, int]) -> None:
    assert host_and_port(text) == parts


@pytest.mark.parametrize(
    "text",
    ["", "lab1", "8080", ":80", "lab1:", "lab1:x", "lab1:-1", "lab1:70000", "lab1:²", "h:" + "1" * 99],
)
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match="no HOST:PORT") as e:
        host_and_port(text, example="lab2:80")
    assert "lab2:80" in e.value.remedy
