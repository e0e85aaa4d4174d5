"""Each page in Chinese has the headings, code, codes, figures in code and links of the page in English."""

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.architecture.pages import FENCED, INDENTED, links, prose
from tests.architecture.source import ROOT

DOCS = ROOT / "docs"
PAGES = sorted(p.name.removesuffix(".zh-CN.md") for p in DOCS.glob("*.zh-CN.md"))
CHINESE = re.compile(r"[一-鿿]")


def read(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def test_the_pages_people_start_with_are_there() -> None:
    assert {"tutorial", "troubleshooting", "how-it-decides"} <= set(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_blocks_of_code_are_the_same(page: str) -> None:
    english, chinese = read(f"{page}.md"), read(f"{page}.zh-CN.md")
    assert FENCED.findall(chinese) == FENCED.findall(english)
    assert INDENTED.findall(FENCED.sub("", chinese)) == INDENTED.findall(FENCED.sub("", english))


@pytest.mark.parametrize("page", PAGES)
def test_headings_rows_and_code_have_their_counterparts(page: str) -> None:
    english, chinese = prose(read(f"{page}.md")), prose(read(f"{page}.zh-CN.md"))
    levels = re.compile(r"^(#+) (?:(\d+)\. )?", re.MULTILINE)
    assert levels.findall(chinese) == levels.findall(english)
    cells = re.compile(r"^\|.*\|$", re.MULTILINE)
    columns = [[row.replace(r"\|", "").count("|") for row in cells.findall(t)] for t in (english, chinese)]
    assert columns[1] == columns[0]
    spans = [Counter(re.sub(r"\s+", " ", s) for s in re.findall(r"`([^`]+)`", t)) for t in (english, chinese)]
    assert set(spans[1]) == set(spans[0])
    codes = [Counter(re.findall(r"\b(?:EV|DR)\d{3}\b", t, re.ASCII)) for t in (english, chinese)]
    assert codes[1] == codes[0]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_the_same_pages(page: str) -> None:
    pages = [
        sorted(Path(target.replace(".zh-CN", "")).name for target, _ in links(read(name)))
        for name in (f"{page}.md", f"{page}.zh-CN.md")
    ]
    assert pages[1] == pages[0]


@pytest.mark.parametrize("page", PAGES)
def test_the_chinese_page_is_in_chinese(page: str) -> None:
    """No paragraph, row or heading of it was left in English."""
    for part in re.split(r"\n\n|\n(?=[-|])", prose(read(f"{page}.zh-CN.md"))):
        words = re.findall(r"[A-Za-z]{2,}", re.sub(r"`[^`]*`|\]\([^)]*\)|\*[^*]*\*", "", part))
        assert CHINESE.search(part) or len(words) < 6, part


@pytest.mark.parametrize("page", PAGES)
def test_readmes_and_the_other_language_link_the_page(page: str) -> None:
    assert f"](docs/{page}.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"](docs/{page}.zh-CN.md)" in (ROOT / "README.zh-CN.md").read_text(encoding="utf-8")
    assert f"]({page}.zh-CN.md)" in read(f"{page}.md")
    assert f"]({page}.md)" in read(f"{page}.zh-CN.md")
