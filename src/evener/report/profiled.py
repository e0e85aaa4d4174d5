"""One profiled step of all devices: merged into one Chrome trace, and read for use and communication.

device process   2RECV_F0 | 2F0 | 2SEND_F0 | …     actions, ranges over everything below
   thread        aten::addmm, gloo:all_reduce …    operators and messages
   stream        kernels and copies                accelerators only
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from evener.core.actions import parse_action
from evener.core.figures import Value
from evener.core.words import counted
from evener.errors import FileError

MOST_EVENTS = 20_000
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
INNER = ("INPUT", "REDUCE_GRAD")
"""Ranges inside of actions: reading samples, and the wait for the sums inside of STEP."""
_KEPT = ("user_annotation", "cpu_op", "gpu_user_annotation", *ON_DEVICE)
_MESSAGES = ("gloo:", "nccl:", "ncclDevKernel", "ncclKernel", "rccl", "c10d::", "xccl")
_TRAVELLING = ("SEND_F", "RECV_F", "SEND_B", "RECV_B", "REDUCE_GRAD")


class Event(Value, frozen=True, kw_only=True):
    """Something a device did: `start_us` on its host's wall clock, `lane` a thread or stream."""

    name: str
    category: str
    lane: str
    start_us: float
    length_us: float


class DeviceProfile(Value, frozen=True, kw_only=True):
    """What torch's profiler saw of one step on one device; `left_out` counts the shortest events dropped."""

    device: str
    type: str
    step: int
    events: tuple[Event, ...]
    left_out: int = 0


class Use(Value, frozen=True, kw_only=True):
    """How one device spent a profiled step of `step_s` seconds; the three parts are of that step.

    `busy`: something computed (a kernel on an accelerator, an operator on a CPU). `communication`:
    a message, a reduction or the wait for one was under way. `exposed`: the same while nothing computed.
    `operators` are those of most seconds, with how often they ran.
    """

    device: str
    step_s: float
    busy: float
    communication: float
    exposed: float
    operators: tuple[tuple[str, float, int], ...]


def from_kineto(trace: dict[str, Any], *, device: str, type_: str, step: int) -> DeviceProfile:
    """The events of a Chrome trace of torch's profiler, on the wall clock; the longest where too many."""
    base_us = trace.get("baseTimeNanoseconds", 0) / 1e3
    found = [
        Event(
            name=str(e["name"])[:200],
            category=e["cat"],
            lane=str(e["tid"]),
            start_us=base_us + e["ts"],
            length_us=e["dur"],
        )
        for e in trace["traceEvents"]
        if e.get("ph") == "X" and e.get("cat") in _KEPT
    ]
    kept = sorted(found, key=lambda e: (not is_action(e), -e.length_us))[:MOST_EVENTS]
    return DeviceProfile(
        device=device,
        type=type_,
        step=step,
        events=tuple(sorted(kept, key=lambda e: e.start_us)),
        left_out=len(found) - len(kept),
    )


def is_action(event: Event) -> bool:
    """Whether the event is an action of the schedule, or the reading of samples inside of one."""
    if event.category != "user_annotation":
        return False
    if event.name in INNER:
        return True
    try:
        parse_action(event.name)
    except ValueError:
        return False
    return True


def merged(profiles: Sequence[DeviceProfile]) -> bytes:
    """One Chrome trace of all `profiles`: a process a device, times from the first event of any.

    Hosts have wall clocks of their own, so devices of two hosts lie as far apart as those do.
    """
    first = min((e.start_us for p in profiles for e in p.events), default=0.0)
    events: list[dict[str, Any]] = []
    for pid, p in enumerate(profiles, start=1):
        events.append({"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": p.device}})
        lanes = {"actions": 0}
        for e in p.events:
            lane = "actions" if is_action(e) and e.name not in INNER else e.lane
            tid = lanes.setdefault(lane, len(lanes))
            ts = round(e.start_us - first, 3)
            events.append(
                {
                    "ph": "X",
                    "name": e.name,
                    "cat": e.category,
                    "pid": pid,
                    "tid": tid,
                    "ts": ts,
                    "dur": e.length_us,
                }
            )
        for lane, tid in lanes.items():
            name = lane if lane == "actions" else f"thread or stream {lane}"
            events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}})
    headers = [{"device": p.device, "type": p.type, "step": p.step, "left_out": p.left_out} for p in profiles]
    document = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"profiled": headers}}
    return msgspec.json.encode(document) + b"\n"


def read_profiled(raw: bytes) -> tuple[DeviceProfile, ...]:
    """The profiles in a trace that `merged` wrote. Raises FileError for anything else."""
    try:
        document = msgspec.json.decode(raw)
        headers = document["otherData"]["profiled"]
        events: list[list[Event]] = [[] for _ in headers]
        for e in document["traceEvents"]:
            if e["ph"] == "X":
                found = {
                    "name": e["name"],
                    "category": e["cat"],
                    "lane": str(e["tid"]),
                    "start_us": e["ts"],
                    "length_us": e["dur"],
                }
                events[e["pid"] - 1].append(msgspec.convert(found, Event))
        return tuple(
            msgspec.convert(h | {"events": tuple(found)}, DeviceProfile)
            for h, found in zip(headers, events, strict=True)
        )
    except (msgspec.MsgspecError, KeyError, TypeError, ValueError, IndexError, AttributeError) as e:
        what = f"profiled-step.json is no trace that evener merged: {type(e).__name__} {e}"
        raise FileError(what, remedy="evener train --profile-step N") from e


def use(profile: DeviceProfile) -> Use:
    """Use and communication of one device in its profiled step, from unions of its events' times.

    The step lasts from the first action to the end of the last. Example: actions from 0 to 10 ms, kernels
    over 6 ms, a reduction over the last 4 ms of which 1 ms beside a kernel: busy 0.6, communication 0.4,
    exposed 0.3. FileError for a profile without an action.
    """
    actions = [e for e in profile.events if is_action(e)]
    if not actions:
        raise FileError(f"the profile of {profile.device} holds no action", remedy="--profile-step N again")
    begin = min(e.start_us for e in actions)
    end = max(e.start_us + e.length_us for e in actions)
    travelling = union(_interval(e) for e in profile.events if _travels(e))
    computing = union(_interval(e) for e in profile.events if _computes(e, profile))
    communication = clipped(travelling, begin, end)
    busy = clipped(computing, begin, end)
    both = length(overlap(communication, busy))
    whole = max(end - begin, 1e-9)
    own = own_seconds([e for e in profile.events if _computes(e, profile)])
    return Use(
        device=profile.device,
        step_s=whole / 1e6,
        busy=length(busy) / whole,
        communication=length(communication) / whole,
        exposed=(length(communication) - both) / whole,
        operators=tuple(
            (name, own[name][0], own[name][1]) for name in sorted(own, key=lambda n: -own[n][0])[:8]
        ),
    )


def own_seconds(events: Sequence[Event]) -> dict[str, tuple[float, int]]:
    """Seconds of the events of each name without the events inside of them, and how many there are.

    Example: an operator of 5 ms that spends 4 ms in another one on its thread has 1 ms of its own.
    """
    own: Counter[str] = Counter()
    times = Counter(e.name for e in events)
    open_: dict[str, list[Event]] = {}
    for e in sorted(events, key=lambda e: (e.start_us, -e.length_us)):
        around = open_.setdefault(e.lane, [])
        while around and around[-1].start_us + around[-1].length_us <= e.start_us:
            around.pop()
        if around:
            own[around[-1].name] -= e.length_us  # type: ignore[assignment]
        own[e.name] += e.length_us  # type: ignore[assignment]
        around.append(e)
    return {name: (us / 1e6, times[name]) for name, us in own.items()}


def _travels(event: Event) -> bool:
    """Whether the event is a message, a reduction, or the action that waits for one."""
    if event.name.startswith(_MESSAGES):
        return True
    return is_action(event) and event.name.lstrip("0123456789").rstrip("0123456789") in _TRAVELLING


def _computes(event: Event, profile: DeviceProfile) -> bool:
    """Whether the event is work of the device; its own operators if it has no kernels to tell."""
    if event.name.startswith(_MESSAGES):
        return False
    return event.category == ("cpu_op" if profile.type == "cpu" else "kernel")


Interval = tuple[float, float]


def _interval(event: Event) -> Interval:
    return event.start_us, event.start_us + event.length_us


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Disjoint intervals that cover the same. Example: (0, 2), (1, 3), (5, 6) gives (0, 3), (5, 6)."""
    joined: list[Interval] = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((begin, end))
    return joined


def clipped(intervals: Iterable[Interval], begin: float, end: float) -> list[Interval]:
    """What of `intervals` lies between `begin` and `end`."""
    return [(max(a, begin), min(b, end)) for a, b in intervals if b > begin and a < end]


def overlap(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """Where both cover. Example: (0, 3) and (2, 5) give (2, 3)."""
    found, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        begin, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if begin < end:
            found.append((begin, end))
        i, j = (i + 1, j) if a[i][1] < b[j][1] else (i, j + 1)
    return found


def length(intervals: Iterable[Interval]) -> float:
    """The sum of their lengths."""
    return sum(end - begin for begin, end in intervals)


def left_out_note(profile: DeviceProfile) -> str:
    """Example: "lab1/a: the shortest 512 events are left out"."""
    return f"{profile.device}: the shortest {counted(profile.left_out, 'event')} are left out"
