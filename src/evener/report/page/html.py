"""The document as one HTML file: style, script and data inside, and a policy that lets nothing else in.

Names come from files of others, so the page is safe in three ways: the data is JSON in which no "<" is
left, the script makes text nodes only, and the policy runs just this script (by its hash) and loads nothing.
"""

import base64
import hashlib
from functools import cache
from importlib.resources import files

import jinja2
import msgspec
from markupsafe import Markup

from evener.report.page.document import Comparison, Document

SCRIPTS = ("base.js", "plan.js", "bars.js", "timeline.js", "charts.js", "live.js", "main.js")
_STATIC = files("evener.report.page") / "static"
_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def page(document: Document, *, compared: Comparison | None = None, live: bool = False) -> str:
    """The page of `document`, with another run beside it if given; a live one asks its server for changes."""
    given = {"document": document, "comparison": compared, "live": live}
    return _template().render(
        title=f"{document.name} · evener",
        policy=policy(live=live),
        style=Markup(_style()),
        script=Markup(_script()),
        data=Markup(embedded(msgspec.json.encode(given).decode())),
        text=document.text,
        live=live,
    )


def policy(*, live: bool) -> str:
    """The page's Content-Security-Policy: one style, one script, by hash; live also its own server."""
    sources = [
        "default-src 'none'",
        f"style-src '{_hash(_style())}'",
        f"script-src '{_hash(_script())}'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    return "; ".join([*sources, "connect-src 'self'"] if live else sources)


def embedded(json: str) -> str:
    """`json` as it may stand in a script element: the same value, without characters that end one.

    Example: the JSON text "</script>" becomes "\\u003c/script\\u003e" in its quotes.
    """
    for character, escape in _ESCAPES.items():
        json = json.replace(character, escape)
    return json


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(_text("page.html.j2"))


@cache
def _style() -> str:
    return _text("vendor/uPlot.min.css") + "\n" + _text("page.css")


@cache
def _script() -> str:
    """All scripts in one: the chart library with its licence, then ours in a scope of their own."""
    licence = _text("vendor/uPlot.LICENSE").replace("*/", "* /")
    ours = "\n".join(map(_text, SCRIPTS))
    library = f"/* uPlot\n{licence}\n*/\n{_text('vendor/uPlot.iife.min.js')}"
    return f"{library}\n(() => {{\n'use strict';\n{ours}\n}})();\n"


def _text(name: str) -> str:
    return (_STATIC / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
