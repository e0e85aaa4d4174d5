"""What an onlooker is sent: the parts that changed, and looks that nobody asked for do not happen."""

import asyncio
import json

from evener.core.trace import Trace
from evener.serving.feed import Feed, event
from tests.unit.report.page.runs import finish, run_folder, spans, write_metrics
from tests.unit.report.worked import RECORDS


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def feed_of(path) -> tuple[Feed, Clock]:
    clock = Clock()
    return Feed(path, clock=clock), clock


def test_only_the_parts_that_changed_are_sent(tmp_path) -> None:
    path = run_folder(tmp_path / "run", finished=False, records=RECORDS[:5])
    feed, clock = feed_of(path)
    feed.look()
    had: dict[str, bytes] = {}
    first = feed.changes(had)
    assert {"plan", "stats", "timeline", "curves"} <= set(first) and feed.changes(had) == {}
    write_metrics(path, RECORDS[5:], mode="ab")
    clock.now = 2.0
    feed.look()
    again = feed.changes(had)
    assert "plan" not in again and {"stats", "curves", "progress"} <= set(again)
    assert json.loads(again["progress"])["done"] == 10


def test_no_more_than_one_look_a_second(tmp_path) -> None:
    path = run_folder(tmp_path / "run", finished=False, records=RECORDS[:5])
    feed, clock = feed_of(path)
    feed.look()
    write_metrics(path, RECORDS[5:], mode="ab")
    clock.now = 0.9
    feed.look()
    assert feed.follower.seen == 5
    clock.now = 1.0
    feed.look()
    assert feed.follower.seen == 10


def test_the_timeline_is_made_once(tmp_path, monkeypatch) -> None:
    from evener.serving import feed as module

    made = []
    monkeypatch.setattr(module, "timeline", lambda run: made.append(run))
    path = run_folder(tmp_path / "run", finished=False, records=RECORDS[:5])
    feed, clock = feed_of(path)
    feed.look()
    write_metrics(path, RECORDS[5:], mode="ab")
    clock.now = 2.0
    feed.look()
    assert len(made) == 1
    finish(path, RECORDS, Trace(source="measured", spans=spans(), steps=3))
    clock.now = 4.0
    feed.look()
    assert len(made) == 2 and feed.finished


def test_a_finished_run_is_sent_whole_and_ended(tmp_path) -> None:
    feed = Feed(run_folder(tmp_path / "run"))

    async def collect() -> list[bytes]:
        return [e async for e in feed.events()]

    parts, end = asyncio.run(collect())
    assert parts.startswith(b"event: parts\ndata: {") and parts.endswith(b"}\n\n") and parts.count(b"\n") == 3
    sent = json.loads(parts.split(b"data: ")[1])
    assert sent["name"] == "run" and end == b"event: end\ndata: {}\n\n"
    assert feed.onlookers == 0


def test_an_event_is_one_line_of_json() -> None:
    assert event("parts", {"a": b"1", "b": b'"x"'}) == b'event: parts\ndata: {"a":1,"b":"x"}\n\n'


def test_long_looks_are_followed_by_long_pauses(tmp_path) -> None:
    path = run_folder(tmp_path / "run", finished=False, records=RECORDS[:5])
    times = iter([0.0, 0.1, 1.0, 1.1, 40.9, 41.0, 41.1])  # the second look ends at 1.1 s: the next is at 41 s
    feed = Feed(path, clock=lambda: next(times))
    feed.look()
    feed.look()
    write_metrics(path, RECORDS[5:], mode="ab")
    feed.look()
    assert feed.follower.seen == 5
    feed.look()
    assert feed.follower.seen == 10
