"""Chrome-trace JSON: what Perfetto needs, and the way back."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evener.core.trace import CAUSES, Span, Trace
from evener.errors import FileError
from evener.report.chrome import COLOURS, chrome_trace, read_chrome_trace


def span(device, action, start_s, end_s, cause="compute", step=0):
    return Span(device=device, action=action, start_s=start_s, end_s=end_s, cause=cause, step=step)


TRACE = Trace(
    source="measured",
    steps=1,
    note="8:4",
    spans=(
        span("lab/a", "0F0", 0.0, 1.0),
        span("lab/a", "0B0", 1.0, 3.0),
        span("lab/a", "0REDUCE_GRAD", 3.0, 3.5, "reduce"),
        span("lab/a", "STEP", 3.5, 3.6, "optimizer"),
        span("far/b", "1F0", 0.0, 1.2),
        span("far/b", "1B0", 1.2, 2.9),
        span("far/b", "1REDUCE_GRAD", 2.9, 3.5, "reduce"),
        span("far/b", "STEP", 3.5, 3.6, "optimizer"),
    ),
)


def events(raw, phase=None):
    return [e for e in json.loads(raw)["traceEvents"] if phase is None or e["ph"] == phase]


def names_of(raw):
    return {e["tid"]: e["args"]["name"] for e in events(raw, "M") if e["name"] == "thread_name"}


def test_one_named_track_per_device_and_one_process_per_host():
    raw = chrome_trace(TRACE)
    assert sorted(names_of(raw).values()) == ["far/b", "lab/a"]
    processes = [e["args"]["name"] for e in events(raw, "M") if e["name"] == "process_name"]
    assert processes == ["lab (measured)", "far (measured)"]
    assert len({(e["pid"], e["tid"]) for e in events(raw, "X")}) == 2


def test_a_slice_says_what_how_long_and_why():
    first, second = events(chrome_trace(TRACE), "X")[:2]
    assert (first["name"], first["ts"], first["dur"], first["cat"]) == ("0F0", 0.0, 1e6, "compute")
    assert second["ts"] == 1e6
    assert first["args"] == {"step": 0, "cause": "compute", "trace": 0}


def test_every_cause_has_a_colour_of_its_own():
    assert tuple(COLOURS) == CAUSES
    assert len(set(COLOURS.values())) == len(CAUSES)


def test_a_reduction_is_one_arrow_between_the_devices():
    raw = chrome_trace(TRACE)
    (start,), (end,) = events(raw, "s"), events(raw, "f")
    assert start["id"] == end["id"]
    assert isinstance(start["id"], int)
    assert (names_of(raw)[start["tid"]], start["ts"]) == ("far/b", 2.9e6)
    assert (names_of(raw)[end["tid"]], end["ts"]) == ("lab/a", 3e6)
    assert end["bp"] == "e"


def test_reductions_of_different_buckets_and_steps_do_not_mix():
    spans = tuple(
        span(device, f"{stage}REDUCE_GRAD", t + 0.1 * k, t + 0.1 * k + 0.05, "reduce", step=t)
        for stage, device in enumerate(("lab/a", "lab/b", "lab/c"))
        for t in range(2)
        for k in range(2)
    )
    raw = chrome_trace(Trace(source="measured", spans=spans, steps=2))
    assert len(events(raw, "s")) == len(events(raw, "f")) == len(events(raw, "t")) == 4
    by_id = {}
    for e in events(raw, "s") + events(raw, "t") + events(raw, "f"):
        by_id.setdefault(e["id"], set()).add(e["ts"])
    assert [len(times) for times in by_id.values()] == [1, 1, 1, 1]


def test_a_send_points_at_its_receive_and_not_at_another_pipelines():
    spans = (
        span("lab/b", "1RECV_F0", 0.0, 0.2, "wait"),  # was there before the sender
        span("lab/a", "0SEND_F0", 0.1, 0.15, "transfer"),
        span("lab/b", "1SEND_B0", 0.5, 0.6, "transfer"),
        span("lab/a", "0RECV_B0", 0.6, 0.7, "transfer"),
        span("lab/c", "2RECV_F0", 0.0, 0.2, "transfer"),
    )
    raw = chrome_trace(Trace(source="predicted", spans=spans))
    tracks = names_of(raw)
    arrows = {e["id"]: [tracks[e["tid"]]] for e in events(raw, "s")}
    for e in events(raw, "f"):
        arrows[e["id"]].append(tracks[e["tid"]])
    for start, end in zip(events(raw, "s"), events(raw, "f"), strict=True):
        assert start["ts"] < end["ts"]
        assert (start["id"], start["name"]) == (end["id"], end["name"])
    assert sorted(arrows.values()) == [["lab/a", "lab/b"], ["lab/b", "lab/a"]]


def test_predicted_and_measured_lie_over_each_other():
    predicted = Trace(source="predicted", spans=TRACE.spans[:2], steps=1)
    raw = chrome_trace(predicted, TRACE)
    processes = [e["args"]["name"] for e in events(raw, "M") if e["name"] == "process_name"]
    assert processes == ["lab (predicted)", "lab (measured)", "far (measured)"]
    assert read_chrome_trace(raw) == (predicted, TRACE)
    assert len({e["id"] for e in events(chrome_trace(TRACE, TRACE), "s")}) == 2


@settings(max_examples=50)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["lab/a", "lab/b", "far/c"]),
            st.sampled_from(["0F0", "1B2", "0REDUCE_GRAD", "STEP", "any text"]),
            st.floats(0, 1e4),
            st.floats(0, 100),
            st.sampled_from(CAUSES),
            st.integers(0, 9),
        )
    )
)
def test_what_is_written_is_read_back_to_a_nanosecond(rows):
    spans = tuple(span(d, action, t, t + length, cause, step) for d, action, t, length, cause, step in rows)
    (back,) = read_chrome_trace(chrome_trace(Trace(source="predicted", spans=spans, steps=3)))
    assert (back.source, back.steps) == ("predicted", 3)
    assert len(back.spans) == len(spans)
    for a, b in zip(spans, back.spans, strict=True):
        assert (a.device, a.action, a.cause, a.step) == (b.device, b.action, b.cause, b.step)
        assert (a.start_s, a.end_s) == pytest.approx((b.start_s, b.end_s), abs=2e-9)


@pytest.mark.parametrize("raw", [b"", b"[]", b"{}", b'{"traceEvents": [1], "otherData": {}}'])
def test_another_file_is_an_error_that_names_it(raw):
    with pytest.raises(FileError, match=r"other\.json"):
        read_chrome_trace(raw, "other.json")


def test_a_trace_without_spans_is_a_valid_file():
    empty = Trace(source="measured", spans=())
    assert read_chrome_trace(chrome_trace(empty)) == (empty,)
