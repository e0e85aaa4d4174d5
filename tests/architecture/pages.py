"""The project's pages as text: what tests read in them."""

import re

from tests.architecture.source import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")])
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:^    .*\n)+", re.MULTILINE)


def prose(text: str) -> str:
    return INDENTED.sub("", FENCED.sub("", text))


def slugs(text: str) -> set[str]:
    """The places inside a page that a link may name, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def links(text: str) -> list[tuple[str, str]]:
    """(page, place) of each link to a page of the project."""
    found = re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", text)
    return [(page, place) for page, place in found if "://" not in page]


def commands(text: str) -> list[tuple[str, str]]:
    """(verb, rest of the line) of each `evener VERB …`, without what stands in quotes."""
    blocks = "\n".join(block for _, block in FENCED.findall(text)).replace("\\\n", " ")
    lines = [line.split(" #")[0] for line in blocks.splitlines()]
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", FENCED.sub("", text))]
    found = [re.search(r"(?<!import )evener(?:\.cli\.main)? ([a-z]+)\b(.*)", s) for s in (*lines, *spans)]
    return [(m[1], re.sub(r"""(["']).*?\1""", "", m[2])) for m in found if m]
