"""What `import evener` offers: a list that changes only on purpose."""

import subprocess
import sys
from importlib import import_module

import pytest

import evener
from tests.architecture.source import PURE, TOP, TORCH


def test_the_list_of_public_names(golden) -> None:
    golden("public_names.txt", "".join(f"{name:<16}{evener._HOME[name]}\n" for name in evener.__all__))


@pytest.mark.parametrize("name", evener.__all__)
def test_a_public_name_is_there_and_explained(name: str) -> None:
    assert (getattr(evener, name).__doc__ or "").strip()


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        evener.trian  # noqa: B018


def test_importing_evener_imports_no_torch() -> None:
    code = "import sys, evener; evener.Fleet; evener.Plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_no_package_is_named_like_a_public_function() -> None:
    """`evener.profile` must not be a function before and a package after its first import."""
    assert {*PURE, *TORCH, *TOP, "errors"} & set(evener.__all__) == set()
    for package in (*PURE, *TORCH, *TOP):
        assert import_module(f"evener.{package}").__doc__
