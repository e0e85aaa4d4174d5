"""Who may import whom (docs/design.md, section 3), one test a rule."""

import ast
import re
import subprocess
import sys

import pytest

from tests.architecture.source import (
    PURE,
    ROOT,
    SESSION,
    SRC,
    TOP,
    TORCH,
    Module,
    modules,
    nothing,
    package_of,
)

EVERYONE = {"errors", "__version__"}


def strangers(module: Module, allowed: set[str]) -> list[str]:
    """Imports of our own packages that `module` may not have."""
    found = []
    for line, name in module.imports():
        package = package_of(name)
        if package is not None and package not in allowed | EVERYONE:
            found.append(f"{module.place}:{line} imports {name}")
    return found


def test_every_package_has_its_place() -> None:
    packages = {p.parent.name for p in SRC.glob("*/__init__.py")}
    assert packages == {*PURE, *TORCH, *TOP}, "a new package needs a place in docs/design.md and in source.py"


@pytest.mark.parametrize("package", PURE)
def test_a_pure_package_imports_only_those_before_it(package: str) -> None:
    allowed = set(PURE[: PURE.index(package) + 1])
    nothing([x for m in modules(package) for x in strangers(m, allowed)])


@pytest.mark.parametrize("package", TORCH)
def test_a_torch_package_imports_core_only(package: str) -> None:
    nothing([x for m in modules(package) for x in strangers(m, {"core", package})])


@pytest.mark.parametrize("folder", SESSION)
def test_a_folder_of_session_uses_those_before_it_only(folder: str) -> None:
    later = {f"evener.session.{name}." for name in SESSION[SESSION.index(folder) + 1 :]}
    mine = [m for m in modules("session") if m.name.startswith(f"evener.session.{folder}.")]
    nothing([f"{m.place}:{n} {x}" for m in mine for n, x in m.imports() if x.startswith(tuple(later))])


def test_every_folder_of_session_has_its_place() -> None:
    folders = {p.parent.name for p in (SRC / "session").glob("*/__init__.py")}
    assert folders == set(SESSION), "a new folder needs a place in docs/design.md and in source.py"


def test_errors_import_nothing_of_ours() -> None:
    errors = next(m for m in modules("") if m.name == "evener.errors")
    assert [name for _, name in errors.imports()] == []


@pytest.mark.parametrize("package", PURE)
def test_a_pure_package_never_names_torch(package: str) -> None:
    found = [
        f"{m.place}:{n}" for m in modules(package) for n, name in m.imports() if name.split(".")[0] == "torch"
    ]
    nothing(found)


def run_without_torch(code: str) -> subprocess.CompletedProcess:
    """`code` in a fresh process in which importing torch fails."""
    blocked = f"import sys; sys.modules['torch'] = None\n{code}"
    return subprocess.run(
        [sys.executable, "-c", blocked], cwd=ROOT, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("package", [*PURE, ""])
def test_the_pure_half_works_where_torch_cannot_be_imported(package: str) -> None:
    names = [m.name for m in modules(package)]
    done = run_without_torch("".join(f"import {name}\n" for name in names))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("verb", ["plan", "simulate"])
def test_the_verbs_of_the_pure_half_work_where_torch_cannot_be_imported(verb: str) -> None:
    done = run_without_torch(f"from evener.cli.main import main; main(['{verb}', '--help'])")
    assert done.returncode == 0, done.stderr
    assert verb in done.stdout


RANK = re.compile(r"(?<![a-z])rank(s|ed)?(?![a-z])", re.IGNORECASE)


@pytest.mark.parametrize("package", PURE)
def test_the_pure_half_says_device_and_never_rank(package: str) -> None:
    lines = [(m, i, x) for m in modules(package) for i, x in enumerate(m.text.splitlines(), 1)]
    nothing([f"{m.place}:{i} {x.strip()}" for m, i, x in lines if RANK.search(x)])


TORCHS_RANKS = {"get_rank", "get_world_size", "get_global_rank", "get_group_rank", "get_node_local_rank"}


def test_only_one_file_of_the_runtime_knows_where_ranks_come_from() -> None:
    found = []
    for module in modules("runtime", "rehearsal"):
        names = {getattr(n, "attr", None) or getattr(n, "id", None) for n in ast.walk(module.tree)}
        if module.place != "evener/runtime/ranks.py" and (names & TORCHS_RANKS or '"RANK"' in module.text):
            found.append(module.place)
    nothing(found)


GLOBAL_STATE = {"time", "random", "socket", "datetime", "secrets", "uuid"}
SEEDED = {"random.Random", "datetime.timedelta", "numpy.random.default_rng"}


@pytest.mark.parametrize("package", PURE)
def test_clock_randomness_and_network_are_arguments(package: str) -> None:
    """A pure package may name a clock as a default, never call one; a seeded generator is no global."""
    found = []
    for module in modules(package):
        home = {name.split(".")[-1]: name for _, name in module.imports()}
        home |= {"np": "numpy"}
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.Call) or isinstance(getattr(node.func, "value", None), ast.Call):
                continue
            first, dot, rest = ast.unparse(node.func).partition(".")
            called = home.get(first, first) + dot + rest
            unseeded = called.startswith("numpy.random.") or called.split(".")[0] in GLOBAL_STATE
            if unseeded and not (called in SEEDED and (node.args or node.keywords)):
                found.append(f"{module.place}:{node.lineno} calls {called}")
    nothing(found)
