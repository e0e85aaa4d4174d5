"""All plan shapes on small fleets: K15, memory that forces pipelines, recomputation, what does not fit."""

import pytest
from msgspec.structs import replace

from evener.core.exchange import exchange_of
from evener.core.figures import line
from evener.core.fleet import Device, Fleet, Link, TriedSum
from evener.core.job import Job
from evener.core.profile import Layer, Profile, Timing
from evener.cost.evaluate import CostModel, evaluate
from evener.cost.exchange import spelled_ring, ways_of
from evener.errors import NoPlanFitsError, UnknownNameError, UsageError
from evener.planner import plan
from evener.planner.placing import matching
from tests.unit.planner.small import figure

MIB = 2**20
FREE = ("unlinked",)


def chain(seconds, *, layers=8, param=10 * MIB, saved=0, output=0, sizes=(1, 2, 4, 8), update=None):
    """Equal layers; `seconds` of a layer and sample by kind, a third of it forward."""
    made = tuple(
        Layer(
            name=f"l{i}",
            num_params=1,
            param_bytes=param,
            saved_bytes_per_sample=saved,
            output_bytes_per_sample=output,
        )
        for i in range(layers)
    )
    timings = tuple(
        Timing(
            layer=x.name,
            kind=kind,
            micro_batch=b,
            forward_s=figure(s * b / 3),
            backward_s=figure(s * b * 2 / 3),
            update_s=update,
        )
        for x in made
        for kind, s in seconds.items()
        for b in sizes
    )
    return Profile(model="chain", layers=made, timings=timings)


def devices(*kinds_and_memory, hosts=None, curve=None):
    names = hosts or ["h"] * len(kinds_and_memory)
    made = tuple(
        Device(name=f"{h}/{i}", kind=k, memory_bytes=figure(m))
        for i, (h, (k, m)) in enumerate(zip(names, kinds_and_memory, strict=True))
    )
    links = (
        tuple(Link(a=a, b=b, curve=curve) for a in set(names) for b in set(names) if a <= b) if curve else ()
    )
    return Fleet(devices=made, links=links)


def stages_of(result):
    return [[(len(s.layers), s.shares[0].devices[0]) for s in p.stages] for p in result.plan.pipelines]


def layers_that_fit(count, param=10 * MIB):
    """Bytes for `count` layers' parameters, gradients and reduction buckets."""
    return (count * 2 * param + 16 * MIB) / 0.9 + 1


def test_k15_the_best_cut_is_six_and_two():
    """Neither device holds all 8 layers, so it is a pipeline: 6 + 2 takes 54, 4 + 4 would take 100."""
    fleet = devices(("fast", layers_that_fit(7)), ("slow", layers_that_fit(7)))
    result = plan(
        fleet, chain({"fast": 1.0, "slow": 3.0}), Job(global_batch=8, micro_batch=1, allow=FREE), shapes="all"
    )
    assert stages_of(result) == [[(6, "h/0"), (2, "h/1")]]
    assert result.plan.prediction.step_s == pytest.approx(54)
    assert result.plan.schedule == "1f1b"
    even = next(a for a in result.alternatives if a.name == "even pipeline")
    assert even.step_s == pytest.approx(100)


def test_auto_looks_at_pipelines_only_where_no_device_holds_the_model():
    profile = chain({"fast": 1.0, "slow": 3.0})
    small = devices(("fast", layers_that_fit(7)), ("slow", layers_that_fit(7)))
    assert not plan(small, profile, Job(global_batch=8, allow=FREE), shapes="auto").plan.is_data_parallel
    large = devices(("fast", layers_that_fit(9)), ("slow", layers_that_fit(9)))
    result = plan(large, profile, Job(global_batch=8, allow=FREE), shapes="auto")
    assert result.plan.is_data_parallel
    assert "--shapes all" in result.reasons[-1]
    with pytest.raises(NoPlanFitsError):
        plan(small, profile, Job(global_batch=8, allow=FREE))


def test_a_slow_link_turns_data_parallelism_into_a_pipeline():
    """80 MiB of gradients against 1 KiB of activations over 10 MB/s."""
    fleet = devices(("k", 1e10), ("k", 1e10), hosts=["a", "b"], curve=line(1e-3, 1e7))
    result = plan(fleet, chain({"k": 0.1}, output=1024), Job(global_batch=16), shapes="all")
    assert [len(p.stages) for p in result.plan.pipelines] == [2]
    data = next(a for a in result.alternatives if a.name == "data parallel")
    assert result.plan.prediction.step_s < data.step_s


def test_two_slow_devices_share_a_stage():
    """Two layers, each device holds one: the fast device runs one, two of half its speed share the other."""
    room = layers_that_fit(1, 40 * MIB)
    fleet = devices(("fast", room), ("slow", room), ("slow", room), curve=line(1e-6, 1e12))
    profile = chain({"fast": 1.0, "slow": 2.0}, layers=2, param=40 * MIB)
    result = plan(fleet, profile, Job(global_batch=16), shapes="all")
    (pipeline,) = result.plan.pipelines
    assert sorted([x.samples for x in s.shares] for s in pipeline.stages) == [[1, 1], [2]]
    assert result.plan.prediction.step_s == pytest.approx(18, rel=1e-3)


def test_recomputation_where_activations_do_not_fit():
    """240 MiB of activations in each half; the first half has two micro-batches in flight and 400 MiB."""
    fleet = devices(("k", 400 * MIB), ("k", 400 * MIB))
    profile = chain({"k": 1.0}, saved=60 * MIB, sizes=(1,))
    result = plan(fleet, profile, Job(global_batch=4, memory_margin=0.0, allow=FREE), shapes="all")
    (pipeline,) = result.plan.pipelines
    assert [(len(s.layers), s.recompute) for s in pipeline.stages] == [(4, True), (4, False)]


def test_no_plan_fits_says_how_much_is_missing():
    fleet = devices(("k", 30 * MIB), ("k", 30 * MIB))
    with pytest.raises(NoPlanFitsError, match=r"176 MiB.*54 MiB in all") as caught:
        plan(fleet, chain({"k": 1.0}), Job(global_batch=4), shapes="all")
    assert "122 MiB more memory" in caught.value.remedy


def test_a_layer_without_seconds_is_named():
    profile = chain({"k": 1.0})
    timings = tuple(t for t in profile.timings if t.layer != "l3")
    broken = Profile(model="m", layers=profile.layers, timings=timings)
    with pytest.raises(UnknownNameError, match=r"l3|no measurements"):
        plan(devices(("k", 1e9)), broken, Job(global_batch=4), shapes="all")


def test_the_prediction_is_the_evaluation_and_its_causes_add_up():
    fleet = devices(("fast", layers_that_fit(7)), ("slow", layers_that_fit(7)), curve=line(1e-4, 1e9))
    profile = chain({"fast": 1.0, "slow": 3.0}, output=MIB, update=figure(0.01))
    result = plan(fleet, profile, Job(global_batch=8), shapes="all")
    prediction = result.plan.prediction
    again = evaluate(CostModel(fleet=fleet, profile=profile), result.plan)
    assert prediction.step_s == pytest.approx(again.step_s)
    assert prediction.lower_s < prediction.step_s < prediction.upper_s
    for causes in prediction.seconds.values():
        assert sum(causes.values()) == pytest.approx(prediction.step_s)
    assert result.bound_s <= prediction.step_s


def test_data_parallel_plans_cost_the_same_in_both_models():
    fleet = devices(("fast", 1e10), ("slow", 1e10), curve=line(1e-4, 1e9))
    profile = chain({"fast": 1.0, "slow": 3.0}, update=figure(0.01))
    flat = plan(fleet, profile, Job(global_batch=12)).plan
    whole = evaluate(CostModel(fleet=fleet, profile=profile), flat)
    assert whole.step_s == pytest.approx(flat.prediction.step_s, rel=1e-9)


def test_wishes_about_layers_are_kept():
    """The head on the slow device, the first two layers on the fast kind."""
    fleet = devices(("fast", 1e10), ("slow", 1e10), ("slow", 1e10), curve=line(1e-6, 1e12))
    profile = chain({"fast": 1.0, "slow": 3.0})
    job = Job(global_batch=8, place={"l7": "h/2", "l0-1": "fast"})
    found = plan(fleet, profile, job).plan
    for pipeline in found.pipelines:
        where = {n: {x.devices[0] for x in s.shares} for s in pipeline.stages for n in s.layers}
        assert where["l7"] == {"h/2"}
        assert where["l0"] == where["l1"] == {"h/0"}


@pytest.mark.parametrize(
    ("place", "error", "words"),
    [
        ({"l9": "fast"}, UnknownNameError, "no layer matches 'l9'"),
        ({"l1": "tpu"}, UnknownNameError, "'tpu'"),
        ({"l1": "fast", "l*": "slow"}, UsageError, "layer 'l1' no device"),
    ],
)
def test_wishes_that_cannot_be_met_are_named(place, error, words):
    fleet = devices(("fast", 1e10), ("slow", 1e10))
    with pytest.raises(error, match=words):
        plan(fleet, chain({"fast": 1.0, "slow": 3.0}), Job(global_batch=8, place=place))


def test_patterns_of_layers():
    names = ("embed.tokens", "blocks.0", "blocks.1", "blocks.10", "head")
    assert matching("embed", names) == (0,)
    assert matching("blocks.0-1", names) == (1, 2)
    assert matching("blocks.*", names) == (1, 2, 3)
    assert matching("head", names) == (4,)


def test_no_shape_is_taken_for_sums_that_were_tried_and_are_slower():
    """The search counts sums by their formula: its plan of two devices took longer than one of them alone."""
    made = devices(("k", 1e12), ("k", 1e12), hosts=["a", "b"], curve=line(1e-5, 1e9))
    names = tuple(d.name for d in made.devices)
    ways = [exchange_of(w.reductions, names) for w in ways_of(made, names)]
    slow = line(60.0, 1e9)
    tried = tuple(
        TriedSum(devices=names, way=w.spelled if w else spelled_ring(names), curve=slow) for w in ways
    )
    profile, job = chain({"k": 1.0}, layers=4, output=10**9), Job(global_batch=16)
    by_formula = plan(made, profile, job, shapes="all")
    assert by_formula.plan.devices == names
    result = plan(replace(made, sums=tried), profile, job, shapes="all")
    assert all(result.plan.prediction.step_s <= a.step_s for a in result.alternatives if a.step_s)


def test_bounds_are_the_edges_of_all_figures_and_two_percent():
    profile = chain({"k": 1.0})
    rough = tuple(
        replace(t, forward_s=replace(t.forward_s, spread=0.1), backward_s=replace(t.backward_s, spread=0.1))
        for t in profile.timings
    )
    result = plan(devices(("k", 1e9)), replace(profile, timings=rough), Job(global_batch=4), shapes="all")
    told = result.plan.prediction
    assert (told.lower_s / told.step_s, told.upper_s / told.step_s) == pytest.approx((0.882, 1.122))
