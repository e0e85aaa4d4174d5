"""Every error has a code of its own, an exit code of the design, and a section in docs/errors.md."""

import pickle
import re

import pytest

from evener import errors
from tests.architecture.source import ROOT

KINDS = [x for x in vars(errors).values() if isinstance(x, type) and issubclass(x, errors.EvenerError)]
PAGE = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (EV\d{3})\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))


def test_codes_are_unique() -> None:
    codes = [kind.code for kind in KINDS]
    assert sorted(codes) == sorted(set(codes))
    assert all(re.fullmatch(r"EV\d{3}", code) for code in codes)


def test_the_page_has_a_section_for_each_code_and_no_other() -> None:
    assert sorted(SECTIONS) == sorted(kind.code for kind in KINDS)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.code)
def test_a_section_names_its_error_and_what_would_work(kind: type[errors.EvenerError]) -> None:
    section = SECTIONS[kind.code]
    assert f"`{kind.__name__}`" in section
    assert "**What would work:**" in section
    assert f"Exit code {kind.exit_code}" in section


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.code)
def test_an_error_survives_the_way_between_processes(kind: type[errors.EvenerError]) -> None:
    error = kind("lab1/gpu0 stopped", numbers="3 of 4", remedy="start it again")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind and str(again) == str(error)
    assert str(error).splitlines()[-1].strip() == f"{kind.code}: see docs/errors.md#{kind.code.lower()}"


def test_exit_codes() -> None:
    assert {kind.exit_code for kind in KINDS} == {1, 2}
    assert {k.__name__ for k in KINDS if k.exit_code == 1} == {"NoPlanFitsError", "NotExactError"}
