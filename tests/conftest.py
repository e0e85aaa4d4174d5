"""Shared by all tests: one thread per process, no hypothesis deadline, and texts kept in tests/golden."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

# Set before anything imports torch: several processes of one thread each share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A machine that stalls for 100 ms must not fail a property.
settings.register_profile("evener", deadline=None, print_blob=True)
settings.load_profile("evener")

GOLDEN = Path(__file__).parent / "golden"

# Their processes, sockets and clocks share a machine with whatever else runs there.
LIVELY = {"local", "faults", "channels"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of real processes are tried once more when they fail; the summary names each that was."""
    for item in items:
        if LIVELY.intersection(item.path.relative_to(Path(__file__).parent).parts):
            item.add_marker(pytest.mark.flaky(reruns=1))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write tests/golden anew instead of comparing"
    )


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """golden(name, text) compares `text` with tests/golden/name; --update-golden writes it."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"{path} is missing: run pytest --update-golden, then read and commit it"
        assert text == path.read_text(encoding="utf-8"), (
            f"{path} differs. If the change is meant: pytest --update-golden, "
            f"then read `git diff {path}` and commit it"
        )

    return check
