"""What the pages say can be followed: links lead somewhere, and commands have the options that they show."""

import json
import re
from pathlib import Path

import pytest

from tests.architecture.pages import FENCED, PAGES, commands, links, slugs
from tests.architecture.source import ROOT, nothing

OPTION = re.compile(r"(?<![\w-])--?[a-z][\w-]*")


def options() -> dict[str, set[str]]:
    """Of each verb, as the command line has them."""
    found: dict[str, set[str]] = {}
    for line in (ROOT / "tests" / "golden" / "cli.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("evener "):
            verb = found.setdefault(line.split()[1], {"--help"})
        else:
            verb |= set(OPTION.findall(line.split("<")[0]))
    return found


OPTIONS = options()


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target, place in links(page.read_text(encoding="utf-8")):
        path = page.parent / target if target else page
        assert path.exists(), target
        assert not place or place in slugs(path.read_text(encoding="utf-8")), f"{target}#{place}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_have_the_options_that_they_show(page: Path) -> None:
    shown = commands(page.read_text(encoding="utf-8"))
    unknown = {verb for verb, _ in shown} - set(OPTIONS)
    nothing(sorted(unknown))
    nothing([f"{verb} {o}" for verb, rest in shown for o in OPTION.findall(rest) if o not in OPTIONS[verb]])


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_blocks_of_code_can_be_read(page: Path) -> None:
    for kind, text in FENCED.findall(page.read_text(encoding="utf-8")):
        if kind == "json":
            json.loads(text)
        elif kind == "python":
            compile(text, page.name, "exec")
