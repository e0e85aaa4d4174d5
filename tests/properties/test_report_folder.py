"""Whatever a run's folder holds: a page or an error of ours, and no markup that is not the page's own."""

import copy
import json
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from evener.errors import EvenerError
from evener.report.page.build import document
from evener.report.page.files import read_run
from evener.report.page.html import page
from evener.serving.follow import Follower
from evener.serving.prometheus import exposition
from tests.unit.report.page.runs import run_folder

FILES = ("plan.json", "report.json", "trace.json", "fleet.json", "run.json")
with tempfile.TemporaryDirectory() as _made:
    WHOLE = {p.name: p.read_bytes() for p in run_folder(Path(_made) / "run").iterdir()}
JSON = {name: json.loads(WHOLE[name]) for name in FILES}

odd = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**20), 10**20),
    st.sampled_from([0, 1e308, -1e308, 5e-324, 2**63, "", "lab/a", [], {}]),
    st.sampled_from(["</script><img src=x>", "\x1b[2J", "\u202e"]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=20),
)


def places(value: Any, path: tuple = ()) -> list[tuple]:
    """Every place in a JSON value."""
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += places(inner, (*path, key))
    return found


PLACES = {name: places(value) for name, value in JSON.items()}


@st.composite
def folders(draw: st.DrawFn) -> dict[str, bytes]:
    """The files of a run of which up to three values are something else, or a file is any bytes."""
    files = dict(WHOLE)
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from(FILES))
        value = copy.deepcopy(json.loads(files[name])) if files[name][:1] == b"{" else None
        path = draw(st.sampled_from(PLACES[name]))
        inner = value
        try:
            for key in path[:-1]:
                inner = inner[key]
            inner[path[-1]] = draw(odd)
        except (KeyError, IndexError, TypeError):
            continue
        files[name] = json.dumps(value).encode()
    if draw(st.booleans()):
        files["metrics.jsonl"] += draw(st.binary(max_size=60)) + b"\n"
    if draw(st.integers(0, 9)) == 0:
        files[draw(st.sampled_from(FILES))] = draw(st.binary(max_size=60))
    return files


@given(folders())
@settings(max_examples=80)
def test_a_folder_gives_a_page_or_an_error_of_ours(files: dict[str, bytes]) -> None:
    with tempfile.TemporaryDirectory() as made:
        for name, raw in files.items():
            (Path(made) / name).write_bytes(raw)
        follower = Follower(made)
        follower.look()
        try:
            run = read_run(made)
        except EvenerError:
            assert follower.run is None
            return
        assert follower.run is not None
        html = page(document(run))
        document(follower.run, live=True)
        exposition(follower.run, follower.seen)
    assert html.count("<script") == 2 and html.count("</script") == 2
    assert "<img" not in html and "\x1b" not in html
