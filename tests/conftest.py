"""Shared by all tests: one thread per process, no hypothesis deadline, golden texts, what may run at once."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
TIME = pytest.StashKey[Any]()  # how long a test may take


def is_lively(path: Path) -> bool:
    return not LIVELY.isdisjoint(path.parts)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of real processes come last, and are tried once more when they fail; the summary names each."""
    here = Path(__file__).parent
    items.sort(key=lambda item: is_lively(item.path.relative_to(here)))
    for item in items:
        if is_lively(item.path.relative_to(here)):
            item.add_marker(pytest.mark.flaky(reruns=1))


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> None:
    item.stash[TIME] = settings


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A second try has as long as the first: pytest-timeout sets its timer once a test, which may be over."""
    if getattr(item, "execution_count", 1) > 1 and TIME in item.stash:
        item.ihook.pytest_timeout_cancel_timer(item=item)
        item.ihook.pytest_timeout_set_timer(item=item, settings=item.stash[TIME])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `pytest -n`: files side by side, and then one process with all tests of real processes."""
    from xdist.scheduler import LoadScopeScheduling

    class BySide(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "lively" if is_lively(Path(file)) else file

    config.option.loadscopereorder = False
    return BySide(config, log)


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
