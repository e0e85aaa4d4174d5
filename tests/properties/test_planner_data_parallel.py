"""The data-parallel planner against enumeration of every split, subset and micro-batch."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from evener.core.buckets import BUCKET_BYTES
from evener.core.collectives import all_reduce_seconds, ring
from evener.core.figures import Figure, line
from evener.core.fleet import Device, Fleet, Link
from evener.core.job import Job
from evener.core.plan import micro_batch_sizes
from evener.core.profile import Layer, Profile, StepTiming
from evener.planner import plan

MS = st.integers(1, 60)


def figure(value):
    return Figure(value=float(value), source="measured")


@st.composite
def cases(draw):
    kinds = draw(st.integers(1, 3))
    largest = draw(st.integers(1, 5))
    steps = []
    for kind in range(kinds):
        forward = sorted(draw(st.lists(MS, min_size=largest, max_size=largest)))
        backward = sorted(draw(st.lists(MS, min_size=largest, max_size=largest)))
        for b in range(largest):
            steps.append(
                StepTiming(
                    kind=str(kind),
                    micro_batch=b + 1,
                    forward_s=figure(forward[b]),
                    backward_s=figure(backward[b]),
                    update_s=figure(draw(MS)) if b == 0 else None,
                    peak_bytes=figure(10 * (b + 1)),
                )
            )
    count = draw(st.integers(1, 3))
    devices = tuple(
        Device(
            name=f"h{draw(st.integers(0, 1))}/{i}",
            kind=str(draw(st.integers(0, kinds - 1))),
            memory_bytes=figure(draw(st.integers(10, 60))),
        )
        for i in range(count)
    )
    hosts = sorted({d.host for d in devices})
    links = tuple(
        Link(a=a, b=b, curve=line(draw(st.integers(1, 20)), BUCKET_BYTES / draw(MS)))
        for a, b in itertools.combinations_with_replacement(hosts, 2)
    )
    layers = tuple(
        Layer(name=str(i), num_params=1, param_bytes=BUCKET_BYTES, flops_per_sample=draw(st.integers(1, 5)))
        for i in range(draw(st.integers(1, 3)))
    )
    profile = Profile(model="m", layers=layers, steps=tuple(steps))
    # one ring, as `step_seconds` sums: of two hosts lanes with packed values may be predicted faster
    job = Job(global_batch=draw(st.integers(1, 6)), memory_margin=0.0, sums="ring")
    return Fleet(devices=devices, links=links), profile, job


def step_seconds(fleet, profile, sizes_by_device):
    """The recursion as it is drawn: buckets one after another behind the last backward of each device."""
    names = list(sizes_by_device)
    rows = {(s.kind, s.micro_batch): s for s in profile.steps}
    ends, last = {}, {}
    for name, sizes in sizes_by_device.items():
        kind = fleet.device(name).kind
        used = [rows[kind, size] for size in sizes]
        ends[name] = rows[kind, 1].update_s.value + sum(r.forward_s.value + r.backward_s.value for r in used)
        last[name] = used[-1].backward_s.value
    if len(names) == 1:
        return ends[names[0]]
    hops = ring(fleet, names)
    flops = [x.flops_per_sample for x in profile.layers]
    end = 0.0
    for layer in reversed(range(len(flops))):
        after = sum(flops[:layer]) / sum(flops)
        ready = max(ends[n] - last[n] * after for n in names)
        end = max(ready, end) + all_reduce_seconds(BUCKET_BYTES, hops)
    return end


def best_by_enumeration(fleet, profile, job):
    ways = []
    largest = max(s.micro_batch for s in profile.steps)
    for device in fleet.devices:
        cap = min(largest, int(device.memory_bytes.value // 10))
        ways.append(
            [()]
            + [
                micro_batch_sizes(n, b)
                for n in range(1, job.global_batch + 1)
                for b in range(1, min(cap, n) + 1)
            ]
        )
    best = float("inf")
    for chosen in itertools.product(*ways):
        if sum(map(sum, chosen)) == job.global_batch:
            used = {d.name: c for d, c in zip(fleet.devices, chosen, strict=True) if c}
            best = min(best, step_seconds(fleet, profile, used))
    return best


@settings(max_examples=120, deadline=None)
@given(cases())
def test_no_split_is_faster_than_the_planned_one(case):
    fleet, profile, job = case
    result = plan(fleet, profile, job)
    planned = {p.devices[0]: p.micro_batch_sizes for p in result.plan.pipelines}
    seconds = step_seconds(fleet, profile, planned)
    assert abs(seconds - result.plan.prediction.step_s) <= 1e-9 * seconds
    assert seconds <= best_by_enumeration(fleet, profile, job) * (1 + 1e-9)
    assert result.status == "proven"
    single = next(a for a in result.alternatives if a.name == "best single device")
    assert seconds <= single.step_s * (1 + 1e-9)
