"""The host's memory is used where it is the fastest that fits: against trying everything."""

import itertools
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from evener.core.figures import line
from evener.core.fleet import Device, Disk, Fleet, Link
from evener.core.job import Job
from evener.core.plan import RESIDENCES, Pipeline, Plan, Share, Stage
from evener.cost.evaluate import CostModel, evaluate
from evener.cost.memory import stage_memory, usable_bytes
from evener.cost.resident_memory import resident_peak
from evener.errors import NoPlanFitsError
from evener.planner import plan as best_plan
from tests.unit.cost.test_residing import given, profile

BATCH = 8
WAYS = [(place, again) for place in (None, *RESIDENCES) for again in (False, True)]


def fleet(
    *memory: float, gb_per_s: float = 20.0, host: float | None = 1e12, disk: float | None = None
) -> Fleet:
    """Cards with so many bytes each in a host with `host` of memory and `disk` on disk (None: unknown)."""
    cards = tuple(
        Device(name=f"a/gpu{i}", kind="card", type="cuda", memory_bytes=given(m))
        for i, m in enumerate(memory)
    )
    cpu = Device(
        name="a/cpu",
        kind="cpu",
        bytes_per_s=given(4e10),
        memory_bytes=given(host) if host else None,
        disk=Disk(read_bytes_per_s=given(2e9), write_bytes_per_s=given(1e9), free_bytes=given(disk))
        if disk
        else None,
    )
    return Fleet(devices=cards, links=(Link(a="a", b="a", curve=line(1e-5, gb_per_s * 1e9)),), hosts=(cpu,))


def single_pipelines(cards: Fleet, job: Job) -> Iterator[Plan]:
    """Every pipeline of one or two stages, in every way that fits."""
    model = CostModel(fleet=cards, profile=profile())
    names = [x.name for x in model.profile.layers]
    for size in (1, 2, 4, 8):
        for count in range(1, len(cards.devices) + 1):
            for devices in itertools.permutations([d.name for d in cards.devices], count):
                for cut in range(1, len(names)) if count == 2 else (len(names),):
                    runs = [names[:cut], names[cut:]][:count]
                    for told in itertools.product(WAYS, repeat=count):
                        stages = tuple(
                            Stage(
                                layers=tuple(run),
                                shares=(Share(devices=(device,), samples=size),),
                                residence=place,
                                recompute=again,
                            )
                            for run, device, (place, again) in zip(runs, devices, told, strict=True)
                        )
                        pipeline = Pipeline(samples=BATCH, micro_batch=size, stages=stages)
                        found = Plan(global_batch=BATCH, pipelines=(pipeline,), schedule="1f1b")
                        if fits(model, found, job):
                            yield found


def fits(model: CostModel, plan: Plan, job: Job) -> bool:
    (pipeline,) = plan.pipelines
    for k, stage in enumerate(pipeline.stages):
        in_flight = min(len(pipeline.stages) - k, len(pipeline.micro_batch_sizes))
        samples, span = pipeline.micro_batch, model.span(stage)
        if stage.residence:
            names = [x.name for x in model.profile.layers]
            held = resident_peak(
                model.bytes, names, span, samples, in_flight, stage.residence, recompute=stage.recompute
            )
        else:
            held = stage_memory(
                model.bytes, *span, samples=samples, in_flight=in_flight, recompute=stage.recompute
            ).total
        device = model.fleet.device(stage.shares[0].devices[0])
        if held > usable_bytes(device, job.memory_margin):
            return False
    return True


@pytest.mark.parametrize(
    ("memory", "gb_per_s"),
    [
        ((0.5e9,), 20.0),
        ((0.6e9,), 2.0),
        ((1.0e9,), 20.0),
        ((1.3e9,), 20.0),
        ((0.55e9, 0.55e9), 20.0),
        ((1.0e9, 0.5e9), 5.0),
    ],
)
def test_no_pipeline_that_fits_is_faster(memory: tuple[float, ...], gb_per_s: float):
    cards, job = fleet(*memory, gb_per_s=gb_per_s), Job(global_batch=BATCH)
    found = best_plan(cards, profile(), job, shapes="all").plan
    model = CostModel(fleet=cards, profile=profile())
    best = min(evaluate(model, p).step_s for p in single_pipelines(cards, job))
    assert found.prediction is not None
    assert found.prediction.step_s <= best * (1 + 1e-9)
    for name, held in found.prediction.memory_bytes.items():
        assert held <= usable_bytes(cards.device(name), job.memory_margin) * (1 + 1e-9)


def residences(plan: Plan) -> set[str | None]:
    return {s.residence for _, _, s in plan.numbered_stages()}


def test_the_hosts_memory_is_left_alone_where_the_devices_suffices():
    found = best_plan(fleet(3e9), profile(), Job(global_batch=BATCH), shapes="all")
    assert residences(found.plan) == {None}


def test_a_plan_that_uses_it_says_the_sum_that_did_not_fit():
    found = best_plan(fleet(0.5e9), profile(), Job(global_batch=BATCH), shapes="auto")
    assert residences(found.plan) == {"host"}
    said = " ".join(found.reasons)
    assert "parameters 381 MiB, gradients 381 MiB, optimiser state 763 MiB" in said
    assert "it offers 429 MiB" in said and "with everything but activations on the host it holds" in said
    assert "from the host come" in said and "one ahead of their use" in said


def test_the_optimiser_alone_goes_where_that_suffices():
    found = best_plan(fleet(1.2e9), profile(), Job(global_batch=BATCH, micro_batch=2), shapes="auto")
    assert residences(found.plan) == {"host-optimizer"}


@pytest.mark.parametrize(
    "cards",
    [
        fleet(0.5e9, host=None),
        fleet(0.5e9, host=1e9),
        replace(fleet(0.5e9), links=()),
    ],
)
def test_a_host_without_room_or_way_is_no_place(cards: Fleet):
    with pytest.raises(NoPlanFitsError):
        best_plan(cards, profile(), Job(global_batch=BATCH), shapes="all")


def test_two_cards_share_the_room_of_their_host():
    cards, job = fleet(0.5e9, 0.5e9, host=1.7e9), Job(global_batch=BATCH)
    found = best_plan(cards, profile(), job, shapes="all").plan  # the model takes 1.6e9 there, once
    held = [s for _, _, s in found.numbered_stages() if s.residence]
    assert held and sum(len(s.layers) for s in held) <= 4


def on_disk(plan: Plan) -> set[bool]:
    return {s.state_on_disk for _, _, s in plan.numbered_stages()}


def test_state_goes_to_the_disk_only_where_the_hosts_memory_does_not_suffice():
    """1.6e9 on the host; with state on disk two of four layers' 2e8 stay: 1.2e9."""
    job = Job(global_batch=BATCH)
    plenty = best_plan(fleet(0.5e9, host=1.7e9, disk=1e12), profile(), job, shapes="auto").plan
    tight = best_plan(fleet(0.5e9, host=1.3e9, disk=1e12), profile(), job, shapes="auto")
    assert (residences(plenty), on_disk(plenty)) == ({"host"}, {False})
    assert (residences(tight.plan), on_disk(tight.plan)) == ({"host"}, {True})
    assert tight.plan.prediction is not None and plenty.prediction is not None
    slower = tight.plan.prediction.step_s - plenty.prediction.step_s
    assert slower == pytest.approx(8e8 / 2e9 + 8e8 / 1e9, rel=0.05)
    said = " ".join(tight.reasons)
    assert "its memory would hold 1.49 GiB for its devices and has 1.21 GiB" in said
    assert "with 763 MiB of optimiser state on its disk" in said and "it holds 1.12 GiB" in said
    assert "reads 2 GB/s (measured, ±0%) and writes 1 (measured, ±0%)" in said


@pytest.mark.parametrize(("host", "disk"), [(1.3e9, None), (1.3e9, 7e8), (1.1e9, 1e12)])
def test_a_disk_that_nobody_knows_or_without_room_is_no_place(host: float, disk: float | None):
    cards = fleet(0.5e9, host=host, disk=disk)
    with pytest.raises(NoPlanFitsError):
        best_plan(cards, profile(), Job(global_batch=BATCH), shapes="all")
