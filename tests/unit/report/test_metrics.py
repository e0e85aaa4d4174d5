"""Metrics as JSON lines: whole after every step, readable after a crash."""

import math

import msgspec
import pytest

from evener.core.records import StepRecord
from evener.errors import FileError
from evener.report.metrics import MetricsWriter, drop_from, read_metrics

RECORDS = tuple(
    StepRecord(step=i, samples=16, step_s=1.0 + i, loss=3.0 - i, lr=1e-3, seconds={"lab/a": {"compute": 0.5}})
    for i in range(3)
)


def written(path, records=RECORDS):
    with MetricsWriter(path) as writer:
        for record in records:
            writer.append(record)
    return path


def test_records_come_back_equal(tmp_path):
    path = written(tmp_path / "run" / "metrics.jsonl")
    back = read_metrics(path)
    assert back.records == RECORDS
    assert back.torn == ""
    assert path.read_bytes().count(b"\n") == 3


def test_every_record_is_on_disk_before_the_next(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        for count, record in enumerate(RECORDS, start=1):
            writer.append(record)
            assert len(read_metrics(path).records) == count


def test_a_torn_last_line_is_left_out_and_reported(tmp_path):
    path = written(tmp_path / "metrics.jsonl")
    path.write_bytes(path.read_bytes()[:-20])
    back = read_metrics(path)
    assert back.records == RECORDS[:2]
    assert "line 3" in back.torn
    assert str(path) in back.torn


def test_appending_after_a_torn_line_cuts_it_off_and_says_so(tmp_path):
    path = written(tmp_path / "metrics.jsonl")
    path.write_bytes(path.read_bytes()[:-20])
    with MetricsWriter(path) as writer:
        assert "line 3" in writer.torn
        writer.append(RECORDS[2])
    assert read_metrics(path).records == RECORDS


def test_a_last_line_that_lacks_only_its_newline_is_whole(tmp_path):
    path = written(tmp_path / "metrics.jsonl")
    path.write_bytes(path.read_bytes()[:-1])
    assert read_metrics(path).records == RECORDS
    with MetricsWriter(path) as writer:
        assert writer.torn == ""
        writer.append(RECORDS[0])
    assert read_metrics(path).records == (*RECORDS, RECORDS[0])


def test_a_broken_line_in_the_middle_is_an_error_that_names_it(tmp_path):
    path = tmp_path / "metrics.jsonl"
    whole = msgspec.json.encode(RECORDS[0]) + b"\n"
    path.write_bytes(whole + b'{"step": 1}\n' + whole)
    with pytest.raises(FileError, match="line 2"):
        read_metrics(path)


def test_a_loss_that_is_not_finite_is_absent(tmp_path):
    record = StepRecord(step=0, samples=1, step_s=1.0, loss=math.nan, skipped="loss is NaN on lab/a")
    back = read_metrics(written(tmp_path / "metrics.jsonl", (record,))).records[0]
    assert back.loss is None
    assert back.skipped == "loss is NaN on lab/a"


def test_a_missing_file_and_an_unwritable_place_are_file_errors(tmp_path):
    with pytest.raises(FileError, match="cannot read"):
        read_metrics(tmp_path / "none.jsonl")
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="cannot write"):
        MetricsWriter(tmp_path / "file" / "metrics.jsonl")


def test_a_record_refuses_unknown_causes_and_no_time():
    with pytest.raises(ValueError, match="coffee"):
        StepRecord(step=0, samples=1, step_s=1.0, seconds={"lab/a": {"coffee": 1.0}})
    with pytest.raises(ValueError, match="positive"):
        StepRecord(step=0, samples=1, step_s=0.0)


def test_records_that_will_come_again_are_dropped(tmp_path):
    path = written(tmp_path / "metrics.jsonl")
    assert drop_from(path, 1) == 2
    assert read_metrics(path).records == RECORDS[:1]
    assert drop_from(path, 5) == 0 and drop_from(tmp_path / "nothing", 0) == 0
