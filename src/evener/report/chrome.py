"""A trace as Chrome-trace JSON, which Perfetto and chrome://tracing open, and the way back.

One process per host (and per source, where a predicted and a measured trace are laid over each other), one
track per device, one slice per span: named by its action, with its cause as category and colour. Arrows join
the slices of one reduction across devices, and each send with its receive.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from evener.core.trace import Span, Trace
from evener.errors import FileError

# Names of the palette that chrome://tracing knows; Perfetto picks its own colours.
COLOURS = {
    "compute": "thread_state_running",
    "wait": "terrible",
    "transfer": "thread_state_iowait",
    "bubble": "grey",
    "reduce": "yellow",
    "optimizer": "good",
    "input": "bad",
    "overhead": "generic_work",
}
_MICROSECONDS = 1e6
_SEND_OR_RECEIVE = re.compile(r"^(\d+)(SEND|RECV)_([FB])(\d+)$")


class _Track(NamedTuple):
    trace: int
    pid: int
    tid: int
    process: str


def chrome_trace(*traces: Trace) -> bytes:
    """Chrome-trace JSON of `traces`; times in µs since the run's start, rounded to whole nanoseconds.

    Example: a span of device "lab/a" with action "0F0" from 1.0 to 1.5 s becomes a slice "0F0" at
    ts 1000000, dur 500000 on track "lab/a" of process "lab (measured)".
    """
    events: list[dict[str, Any]] = []
    tracks = _tracks(traces)
    events += _names(tracks)
    for number, trace in enumerate(traces):
        places = [tracks[number, span.device] for span in trace.spans]
        events += [_slice(span, place) for span, place in zip(trace.spans, places, strict=True)]
        events += _arrows(trace.spans, places, first_id=len(events))
    headers = [{"source": t.source, "steps": t.steps, "note": t.note} for t in traces]
    document = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"name": "evener", "traces": headers},
    }
    return msgspec.json.encode(document) + b"\n"


def read_chrome_trace(raw: bytes, where: str = "the trace") -> tuple[Trace, ...]:
    """The traces in Chrome-trace JSON written by `chrome_trace`, to a nanosecond.

    Raises FileError naming `where` for anything else.
    """
    try:
        document = msgspec.json.decode(raw)
        events = document["traceEvents"]
        tracks = {
            (e["pid"], e["tid"]): e["args"]["name"]
            for e in events
            if e["ph"] == "M" and e["name"] == "thread_name"
        }
        headers = document["otherData"]["traces"]
        spans: dict[int, list[Span]] = {number: [] for number in range(len(headers))}
        for e in events:
            if e["ph"] == "X":
                spans[e["args"]["trace"]].append(_span(e, tracks[e["pid"], e["tid"]]))
        return tuple(
            msgspec.convert(header | {"spans": tuple(spans[number])}, Trace)
            for number, header in enumerate(headers)
        )
    except (msgspec.DecodeError, KeyError, TypeError, ValueError) as e:
        raise FileError(
            f"{where} is no trace that evener wrote: {type(e).__name__} {e}", remedy="trace.json of a run"
        ) from e


def _tracks(traces: Sequence[Trace]) -> dict[tuple[int, str], _Track]:
    """The track of every (trace number, device), in order of first appearance."""
    tracks: dict[tuple[int, str], _Track] = {}
    processes: dict[tuple[int, str], int] = {}
    for number, trace in enumerate(traces):
        for device in dict.fromkeys(span.device for span in trace.spans):
            host = device.partition("/")[0]
            pid = processes.setdefault((number, host), len(processes) + 1)
            tracks[number, device] = _Track(number, pid, len(tracks) + 1, f"{host} ({trace.source})")
    return tracks


def _names(tracks: dict[tuple[int, str], _Track]) -> Iterator[dict[str, Any]]:
    """Metadata events: names and order of processes and tracks."""
    named = set()
    for (_, device), (_, pid, tid, process) in tracks.items():
        if pid not in named:
            named.add(pid)
            yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": process}}
            yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": device}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}


def _slice(span: Span, track: _Track) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": span.action,
        "cat": span.cause,
        "cname": COLOURS[span.cause],
        "pid": track.pid,
        "tid": track.tid,
        "ts": _micros(span.start_s),
        "dur": round(_micros(span.end_s) - _micros(span.start_s), 3),
        "args": {"step": span.step, "cause": span.cause, "trace": track.trace},
    }


def _span(event: dict[str, Any], device: str) -> Span:
    span = {
        "device": device,
        "action": event["name"],
        "start_s": event["ts"] / _MICROSECONDS,
        "end_s": (event["ts"] + event["dur"]) / _MICROSECONDS,
        "cause": event["args"]["cause"],
        "step": event["args"]["step"],
    }
    return msgspec.convert(span, Span)


def _arrows(spans: Sequence[Span], places: Sequence[_Track], *, first_id: int) -> Iterator[dict[str, Any]]:
    """Flow events: each group of slices that belong together, joined in order; ids count up from `first_id`.

    Ids are whole numbers, because Perfetto reads a text as a hexadecimal number; name and category
    are those of the first slice, because chrome://tracing joins by all three.
    """
    for flow_id, members in enumerate(_groups(spans), start=first_id):
        shared = {"name": spans[members[0]].cause, "cat": "flow", "id": flow_id}
        for place, i in enumerate(members):
            phase = "s" if place == 0 else "f" if place == len(members) - 1 else "t"
            where = {"pid": places[i].pid, "tid": places[i].tid, "ts": _micros(_anchor_s(spans[i]))}
            # Without "bp": "e" an arrow ends at the next slice instead of the one it points into.
            yield {"ph": phase, **shared, **where} | ({"bp": "e"} if phase == "f" else {})


def _groups(spans: Sequence[Span]) -> list[list[int]]:
    """Indices of spans that meet, in order of their anchors: reductions, and sends with their receives.

    The k-th reduction of a step on one device meets the k-th on the others. Stages are numbered through the
    whole plan, so two devices spell one reduction 0REDUCE_GRAD and 1REDUCE_GRAD: the number in front does
    not count. What stage s sends is received by stage s + 1 (SEND_F) or s - 1 (SEND_B).
    """
    groups: dict[tuple, list[int]] = {}
    counts: dict[tuple, int] = {}
    for i in sorted(range(len(spans)), key=lambda i: _anchor_s(spans[i])):
        span = spans[i]
        passed = _SEND_OR_RECEIVE.match(span.action)
        if passed:
            stage = int(passed[1])
            if passed[2] == "SEND":
                stage += 1 if passed[3] == "F" else -1
            key: tuple = (span.step, passed[3], stage, passed[4])
        elif span.cause == "reduce":
            what = span.action.lstrip("0123456789")
            nth = counts[span.device, span.step, what] = counts.get((span.device, span.step, what), -1) + 1
            key = (span.step, what, nth)
        else:
            continue
        groups.setdefault(key, []).append(i)
    return [group for group in groups.values() if len({spans[i].device for i in group}) > 1]


def _anchor_s(span: Span) -> float:
    """Where an arrow touches `span`: its start; for a receive just before its end, never before the send."""
    passed = _SEND_OR_RECEIVE.match(span.action)
    waited = passed is not None and passed[2] == "RECV"
    return max(span.start_s, span.end_s - 1e-9) if waited else span.start_s


def _micros(seconds: float) -> float:
    return round(seconds * _MICROSECONDS, 3)
