"""The page runs its own script and nothing else, and a name in the data stays a name."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import pytest

from evener.report.page.build import document
from evener.report.page.files import read_run
from evener.report.page.html import embedded, page, policy
from tests.unit.report.page.runs import run_folder

LIBRARY = "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f"


class Outline(HTMLParser):
    """Tags with their attributes, and the text of scripts and styles."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.inside: list[tuple[str, str]] = []
        self._open = ""
        self.feed(html)

    def handle_starttag(self, tag, attrs) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open = tag

    def handle_endtag(self, tag) -> None:
        self._open = ""

    def handle_data(self, data) -> None:
        if self._open in ("script", "style"):
            self.inside.append((self._open, data))


@pytest.fixture
def html(tmp_path) -> str:
    return page(document(read_run(run_folder(tmp_path / "run"))))


def test_the_policy_names_the_hashes_of_what_is_inside(html: str) -> None:
    outline = Outline(html)
    told = next(a["content"] for t, a in outline.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert told == policy(live=False) and "default-src 'none'" in told and "connect-src" not in told
    style, _data, script = (text for _, text in outline.inside)
    for kind, text in (("style", style), ("script", script)):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in told
    assert "connect-src 'self'" in policy(live=True)


def test_nothing_is_asked_for_from_elsewhere(html: str) -> None:
    for tag, attributes in Outline(html).tags:
        for name in ("src", "href", "action", "srcset", "poster", "data"):
            assert attributes.get(name, "#").startswith(("#", "data:")), (tag, attributes)
    assert "@import" not in html and "url(" not in html
    assert not any(name.startswith("on") or name == "style" for _, a in Outline(html).tags for name in a)


def test_the_data_is_json_in_which_no_element_can_end() -> None:
    hostile = {"name": "</script><script>alert(1)</script><!--", "line": "\u2028 & >"}
    text = embedded(json.dumps(hostile, ensure_ascii=False))
    assert not set("<>&\u2028\u2029") & set(text)
    assert json.loads(text) == hostile


def test_the_text_is_escaped(tmp_path) -> None:
    path = run_folder(tmp_path / "<img src=x onerror=alert(1)>")
    html = page(document(read_run(path)))
    assert "<img" not in html and "&lt;img src=x" in html


def test_the_chart_library_is_the_published_one_with_its_licence(html: str) -> None:
    from evener.report.page.html import _text

    assert hashlib.sha256(_text("vendor/uPlot.iife.min.js").encode()).hexdigest() == LIBRARY
    assert "MIT" in _text("vendor/uPlot.LICENSE") and "Leon Sorokin" in html


def test_no_script_makes_elements_from_text() -> None:
    from evener.report.page.html import SCRIPTS, _text

    ours = "\n".join(map(_text, SCRIPTS))
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", ours)
