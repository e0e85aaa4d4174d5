"""A run's folder as it grows."""

import pytest

from evener.core.files import write
from evener.errors import FileError
from evener.serving import follow
from evener.serving.follow import Follower
from tests.unit.report.page.runs import finish, run_folder, spans, write_metrics
from tests.unit.report.worked import RECORDS, record


def test_only_what_is_new_is_read(tmp_path) -> None:
    path = run_folder(tmp_path / "run", finished=False, records=RECORDS[:3])
    follower = Follower(path)
    assert follower.run is None
    assert follower.look() and not follower.look()
    first = follower.run
    assert first.records == RECORDS[:3] and first.problems == () and first.ending is None
    write_metrics(path, RECORDS[3:], mode="ab")
    assert follower.look() and follower.seen == len(RECORDS)
    assert follower.run.records == RECORDS
    assert follower.run.plan is first.plan and follower.run.fleet is first.fleet, "what stayed is kept"


def test_a_line_that_is_being_written_is_waited_for(tmp_path) -> None:
    path = run_folder(tmp_path / "run", finished=False, records=RECORDS[:2])
    whole = (path / "metrics.jsonl").read_bytes()
    follower = Follower(path)
    (path / "metrics.jsonl").write_bytes(whole[:-10])
    follower.look()
    assert follower.run.records == RECORDS[:1]
    with (path / "metrics.jsonl").open("ab") as f:
        f.write(whole[-10:])
    assert follower.look() and follower.run.records == RECORDS[:2]
    assert follower.run.problems == ()


def test_a_run_that_begins_anew_is_read_anew(tmp_path) -> None:
    path = run_folder(tmp_path / "run", finished=False)
    follower = Follower(path)
    follower.look()
    write_metrics(path, (record(0, loss=1.0),))
    assert follower.look() and [r.loss for r in follower.run.records] == [1.0]


def test_the_end_is_seen(tmp_path) -> None:
    from evener.core.trace import Trace

    path = run_folder(tmp_path / "run", finished=False)
    follower = Follower(path)
    follower.look()
    finish(path, RECORDS, Trace(source="measured", spans=spans(), steps=3))
    assert follower.look() and follower.run.ending is not None and follower.run.traces


def test_a_run_without_a_plan_yet_is_no_error(tmp_path) -> None:
    follower = Follower(tmp_path)
    assert not follower.look() and follower.run is None
    run_folder(tmp_path, finished=False)
    assert follower.look() and follower.run is not None
    with pytest.raises(FileError):
        Follower(tmp_path / "nothing")


def test_a_plan_that_is_none_is_told_when_there_is_one(tmp_path) -> None:
    (tmp_path / "plan.json").write_text("{")
    follower = Follower(tmp_path)
    follower.look()
    assert follower.run is None
    run_folder(tmp_path, finished=False)
    follower.look()
    assert follower.run.problems == ()


def test_links_are_told_once_and_not_followed(tmp_path) -> None:
    path = run_folder(tmp_path / "run", finished=False)
    (path / "metrics.jsonl").rename(tmp_path / "outside")
    (path / "metrics.jsonl").symlink_to(tmp_path / "outside")
    (path / "report.json").symlink_to(tmp_path / "outside")
    follower = Follower(path)
    assert follower.look() and not follower.look()
    assert follower.run.records == () and len(follower.run.problems) == 2


def test_memory_is_bounded(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(follow, "MOST_RECORDS", 4)
    monkeypatch.setattr(follow, "MOST_BYTES_A_LOOK", 2000)
    path = run_folder(tmp_path / "run", finished=False)
    with (path / "metrics.jsonl").open("ab") as f:
        f.write(b"x" * 10_000 + b"\n")
    write_metrics(path, (record(10),), mode="ab")
    follower = Follower(path)
    for _ in range(20):
        follower.look()
    run = follower.run
    assert [r.step for r in run.records] == [7, 8, 9, 10] and follower.seen == 11
    said = " ".join(run.problems)
    assert "newest 4 steps" in said and "no step record" in said


def test_other_files_change_nothing(tmp_path) -> None:
    path = run_folder(tmp_path / "run")
    follower = Follower(path)
    follower.look()
    write(path / "another.json", {"a": 1})
    assert not follower.look()
