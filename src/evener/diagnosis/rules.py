"""The rules as data: which builds of torch carry which architectures, which drivers serve what.

Everything is in rules.json, each row with its source and date. A row is only what its source says; a build
that the table does not hold is judged by what the installed torch says of itself.
"""

import re
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec

from evener.core.figures import Value

_DATA = Path(__file__).with_name("rules.json")
MINIMUM_TORCH = "2.13"
"""The oldest torch evener runs with, as its own package metadata asks for."""
MINIMUM_PYTHON = "3.11"
APART = {53: (53,), 62: (62,), 72: (72,), 87: (87,), 101: (101, 110)}
"""Architectures of chips that share memory with a CPU: their code runs there alone, and no other code does
but that of their own major version's later ones (torch.cuda.DEVICE_REQUIREMENT of torch 2.13)."""


class Row(Value, frozen=True, kw_only=True):
    """A rule with where it was read and when."""

    source: str
    date: str


class Wheel(Row, frozen=True, kw_only=True):
    """An official CUDA build of torch: the architectures it has kernels for, by machine."""

    torch: str
    variant: str
    cuda: str
    archs: dict[str, tuple[int, ...]]
    nccl: str | None = None


class RocmWheel(Row, frozen=True, kw_only=True):
    """An official ROCm build of torch. `assumed` rows were carried over from another version."""

    torch: str
    variant: str
    rocm: str
    archs: tuple[str, ...]
    assumed: bool = False


class Toolkit(Row, frozen=True, kw_only=True):
    """A CUDA toolkit: oldest and newest architecture it compiles for, oldest Linux driver that serves it."""

    cuda: str
    oldest: int
    newest: int
    driver: str


class Generation(Row, frozen=True, kw_only=True):
    """A generation of NVIDIA cards: driver branches that know it, and whether the open module drives it."""

    name: str
    codes: tuple[int, ...]
    first_branch: int | None = None
    last_branch: int | None = None
    open_kernel: Literal["no", "may", "must"]


class Override(Row, frozen=True, kw_only=True):
    """AMD architectures without kernels of their own that run those of a near one, on the user's word."""

    archs: tuple[str, ...]
    like: str
    value: str
    risk: str = ""


class Integrated(Row, frozen=True, kw_only=True):
    """AMD architectures that only processors with graphics have."""

    archs: tuple[str, ...]


class KindArch(Row, frozen=True, kw_only=True):
    """The architecture of kinds of cards, by their whole names; `machine` where they come with a CPU."""

    arch: str
    kinds: tuple[str, ...]
    machine: str = "x86_64"


class Mixing(Row, frozen=True, kw_only=True):
    """What the processes of one group have to share."""

    what: str
    needs: str


class Rules(Value, frozen=True, kw_only=True):
    """All that is in rules.json."""

    wheels: tuple[Wheel, ...]
    rocm_wheels: tuple[RocmWheel, ...]
    toolkits: tuple[Toolkit, ...]
    generations: tuple[Generation, ...]
    overrides: tuple[Override, ...]
    integrated: tuple[Integrated, ...]
    kinds: tuple[KindArch, ...]
    mixing: tuple[Mixing, ...]


@cache
def rules() -> Rules:
    """The rules, read once."""
    return msgspec.json.decode(_DATA.read_bytes(), type=Rules)


def version(text: str) -> tuple[int, ...]:
    """The numbers at the start of a version. Examples: "2.13.0+cu126" gives (2, 13, 0), "" gives ()."""
    found = re.match(r"\d{1,9}(\.\d{1,9})*", text.strip())
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def code(arch: str) -> int | None:
    """The number in an NVIDIA architecture. Examples: "sm_61" gives 61, "compute_120" 120, "gfx1030" None."""
    found = re.fullmatch(r"(?:sm|compute)_(\d{1,4})[a-z]?", arch)
    return int(found[1]) if found else None


def runs(code_for: int, device: int) -> bool:
    """Whether machine code for one architecture runs on another: same major version, minor not newer.

    Example: code for 86 runs on 89 and not on 80; code for 80 does not run on 87, which is a chip apart.
    """
    if code_for in APART:
        return device in APART[code_for]
    if device in APART and code_for // 10 == device // 10:
        return False
    return code_for // 10 == device // 10 and code_for % 10 <= device % 10


def generation(device: int) -> Generation | None:
    """The generation of an architecture. Example: 61 is of Pascal."""
    return next((g for g in rules().generations if device in g.codes), None)


def toolkit(cuda: str) -> Toolkit | None:
    """The newest toolkit of the table that is not newer than `cuda` and of its major version."""
    wanted = version(cuda)[:2]
    fitting = [t for t in rules().toolkits if version(t.cuda)[:1] == wanted[:1] and version(t.cuda) <= wanted]
    return max(fitting, key=lambda t: version(t.cuda), default=None)


def mixing(what: str) -> Mixing:
    """What a group of "nccl", "rccl" or "mig" processes has to share."""
    return next(m for m in rules().mixing if m.what == what)


def override(arch: str) -> Override | None:
    """How an AMD architecture without kernels may run those of a near one; None where nothing is known."""
    return next((o for o in rules().overrides if arch in o.archs), None)


def arch_of(kind: str) -> KindArch | None:
    """The row of a kind; a slice counts as its card: "NVIDIA A100-SXM4-40GB MIG 1g.5gb" is sm_80."""
    whole = kind.partition(" MIG ")[0]
    return next((row for row in rules().kinds if whole in row.kinds), None)
