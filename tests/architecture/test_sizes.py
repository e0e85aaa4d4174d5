"""A file tells one thing: limits on lines and arguments, and a word of explanation on everything public."""

import ast
import re
from statistics import median

import pytest

from tests.architecture.source import Module, modules, nothing

FILE_LINES = 500
MEDIAN_LINES = 200
FUNCTION_LINES = 80
CONSTRUCTOR_ARGUMENTS = 7
ALL = modules()


def lines(module: Module) -> int:
    return module.text.count("\n")


@pytest.mark.parametrize("module", ALL, ids=str)
def test_file(module: Module) -> None:
    assert lines(module) <= FILE_LINES


def test_most_files_are_short() -> None:
    assert median(lines(m) for m in ALL if not m.place.endswith("__init__.py")) <= MEDIAN_LINES


def test_functions() -> None:
    """Of a command from the docstring on: its options, one a line, are a table and no work."""
    long = [
        f"{m.place}:{f.lineno} {f.name} has {n} lines"
        for m in ALL
        for f in m.functions()
        if (n := (f.end_lineno or 0) + 1 - (f.body[0] if m.package == "cli" else f).lineno) > FUNCTION_LINES
    ]
    nothing(long)


def test_constructors() -> None:
    """Written ones; the fields of a frozen structure are named at every use and may be more."""
    wide = []
    for module in ALL:
        for function in module.functions():
            given = function.args
            count = len(given.posonlyargs) + len(given.args) + len(given.kwonlyargs) - 1
            if function.name == "__init__" and count > CONSTRUCTOR_ARGUMENTS:
                wide.append(f"{module.place}:{function.lineno} takes {count} arguments")
    nothing(wide)


def test_everything_public_is_explained() -> None:
    bare = [m.place for m in ALL if not ast.get_docstring(m.tree)]
    for module in ALL:
        for node in module.tree.body:
            public = isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
            if public and not ast.get_docstring(node):
                bare.append(f"{module.place}:{node.lineno} {node.name}")
    nothing(bare)


def test_nothing_is_left_for_later() -> None:
    later = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
    found = [
        f"{m.place}:{i}" for m in ALL for i, line in enumerate(m.text.splitlines(), 1) if later.search(line)
    ]
    nothing(found)


def test_no_error_is_passed_over_in_silence() -> None:
    """`except X: pass` hides what it meets; contextlib.suppress says what may be hidden."""
    found = [
        f"{m.place}:{node.lineno}"
        for m in ALL
        for node in ast.walk(m.tree)
        if isinstance(node, ast.ExceptHandler) and len(node.body) == 1 and isinstance(node.body[0], ast.Pass)
    ]
    nothing(found)
