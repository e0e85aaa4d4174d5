"""What was looked up in tables, as reports tell it."""

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from evener.core.records import StepRecord, TableRecord
from evener.report.live import LiveView
from evener.report.lookups import hits_text, ids_per_s, lookup_lines, lookups_of
from evener.report.page.stats import headline_stats
from evener.serving.follow import Follower
from evener.serving.prometheus import exposition
from tests.unit.report.page.runs import run_folder
from tests.unit.report.worked import PLAN, record

WORD = TableRecord(device="lab/a", ids=300, rows=200, found_in={"hot": 20, "host": 130, "file": 50})
PLAIN = TableRecord(device="lab/a", ids=100, rows=80)


def test_hit_rates_are_parts_of_the_rows_looked_up() -> None:
    assert WORD.hit_rates == {"hot": 0.1, "host": 0.65}
    assert PLAIN.hit_rates == {}
    assert hits_text(WORD) == "10.0 % on the device, 65.0 % in host memory"


def test_steps_add_up_by_table() -> None:
    records = [
        StepRecord(step=n, samples=4, step_s=1.0, tables=tables)
        for n, tables in enumerate([{"word": WORD, "goods": PLAIN}, {}, {"word": WORD}])
    ]
    found = lookups_of(records)
    assert (found["word"].ids, found["word"].rows) == (600, 400)
    assert found["word"].found_in == {"hot": 40, "host": 260, "file": 100}
    assert found["goods"] == PLAIN
    assert ids_per_s(found.values(), 3.0) == pytest.approx(700 / 3)


def test_a_line_for_each_table_and_device() -> None:
    assert lookup_lines([("word", WORD), ("goods", PLAIN)], 0.1) == [
        "table word on lab/a: 3,000 ids/s (2,000 rows/s); rows found 10.0 % on the device, 65.0 % in host "
        "memory (measured)",
        "table goods on lab/a: 1,000 ids/s (800 rows/s) (measured)",
    ]


def test_the_live_line_the_page_and_prometheus_tell_them(tmp_path: Path) -> None:
    tables = {"word": WORD, "goods": PLAIN}
    path = run_folder(tmp_path / "run", finished=False, records=(record(0, tables=tables),))
    follower = Follower(path)
    follower.look()
    assert follower.run is not None
    view = LiveView(PLAN, 1, lambda: 0.0, Console(file=StringIO(), width=300))
    view.update(follower.run.records[0])
    assert "333 ids/s looked up, word 10.0 % on the device, 65.0 % in host memory" in view.line()
    stats = {s.key: s for s in headline_stats(follower.run, None)}
    assert stats["lookups_per_s"].value == pytest.approx(400 / 1.2)
    assert (stats["found_host_word"].text, stats["found_host_word"].unit) == ("65.0", "%")
    assert stats["found_host_word"].source == "measured on lab/a, last 1 step"
    told = exposition(follower.run, follower.seen).decode()
    assert 'evener_table_hit_ratio{device="lab/a",memory="host",table="word"} 0.65' in told
    assert 'evener_table_ids{device="lab/a",table="goods"} 100.0' in told
