"""The project's own source as syntax trees: what the architecture tests read."""

import ast
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "evener"

# In this order: each may import those before it.
PURE = ("core", "schedules", "cost", "sim", "planner", "policy", "report", "diagnosis")
TORCH = ("probing", "profiling", "rehearsal", "runtime")
# The folders of session, in this order: each may import those before it.
SESSION = (
    "layout", "loop", "checkpoints", "planning", "members", "prediction", "launching", "exactness", "drop_in",
)  # fmt: skip
TOP = ("session", "serving", "cli", "integrations")


class Module:
    """One source file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.place = path.relative_to(SRC.parent).as_posix()
        parts = path.relative_to(SRC.parent).with_suffix("").parts
        self.name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        self.text = path.read_text(encoding="utf-8")

    def __repr__(self) -> str:
        return self.place

    @property
    def package(self) -> str:
        """`core` for evener.core.plan; `` for evener.errors and evener itself."""
        parts = self.path.relative_to(SRC).parts
        return parts[0] if len(parts) > 1 else ""

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, filename=str(self.path))

    def imports(self) -> Iterator[tuple[int, str]]:
        """(line, full name) of everything imported, inside functions too."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from ((node.lineno, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{self.place}:{node.lineno} imports relatively; write the full name"
                yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)

    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node


def modules(*packages: str) -> list[Module]:
    """All modules of the named packages, or of the whole project."""
    found = [Module(p) for p in sorted(SRC.rglob("*.py"))]
    return [m for m in found if not packages or m.package in packages]


def package_of(name: str) -> str | None:
    """`core` for evener.core.plan.Plan, `errors` for evener.errors, None for what is not ours."""
    parts = name.split(".")
    if parts[0] != "evener":
        return None
    return parts[1] if len(parts) > 1 else ""


def nothing(found: list[str]) -> None:
    """Fails with one line for each thing found."""
    assert not found, "\n  " + "\n  ".join(found)
