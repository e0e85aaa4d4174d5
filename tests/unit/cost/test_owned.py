"""Bytes and seconds where owners keep state in unequal parts, by hand."""

import pytest
from msgspec.structs import replace

from evener.core.figures import Figure, line
from evener.core.fleet import Device, Fleet, Link
from evener.core.plan import Held, Ownership, Pipeline, Plan, Share, Stage
from evener.core.profile import Layer, Profile, Timing
from evener.cost.evaluate import evaluate
from evener.cost.model import CostModel
from evener.cost.owned import play_owned
from evener.cost.owned_memory import owners_of
from evener.errors import PlanMismatchError

MB = 1_000_000
NAMES = ("a/0", "a/1", "a/2")


def seconds(value: float) -> Figure:
    return Figure(value=value, source="measured")


def profile_of(*param_bytes: int, forward_s: float = 1.0, update_s: float = 0.1, **more) -> Profile:
    """Layers of 1 s forward and 2 s backward at any size measured, 0.1 s of update."""
    layers = tuple(
        Layer(
            name=f"l{i}",
            num_params=b // 4,
            param_bytes=b,
            output_bytes_per_sample=10,
            saved_bytes_per_sample=1000,
            flops_per_sample=1.0,
            tied=more.get("tied", {}).get(i, ()),
        )
        for i, b in enumerate(param_bytes)
    )
    timings = tuple(
        Timing(
            layer=x.name,
            kind="k",
            micro_batch=b,
            forward_s=seconds(forward_s),
            backward_s=seconds(2 * forward_s),
            update_s=seconds(update_s),
        )
        for x in layers
        for b in (1, 4)
    )
    return Profile(model="m", layers=layers, timings=timings, state_bytes=2 * sum(param_bytes))


def fleet_of(latency_s: float = 1e-9, rate: float = 10 * MB) -> Fleet:
    devices = tuple(Device(name=n, kind="k") for n in NAMES)
    return Fleet(devices=devices, links=(Link(a="a", b="a", curve=line(latency_s, rate)),))


def plan_of(
    profile: Profile, samples: tuple[int, ...], parts: tuple[int, ...], held: Held, size: int = 1
) -> Plan:
    names = tuple(x.name for x in profile.layers)
    pipelines = tuple(
        Pipeline(
            samples=n,
            micro_batch=size if n else 1,
            stages=(Stage(layers=names, shares=(Share(devices=(d,), samples=size if n else 1),)),),
        )
        for d, n in zip(NAMES, samples, strict=False)
    )
    shares = dict(zip(NAMES, parts, strict=False))
    owners = tuple(Ownership(layer=n, parts=shares, held=held) for n in names)
    return Plan(global_batch=sum(samples), pipelines=pipelines, owners=owners)


@pytest.mark.parametrize(
    ("held", "told"),
    [
        # parameters, gradients, optimiser state, passing: two buckets, gradients of layers 1 and 2, both
        ("optimizer", (60, 60, 60, 16 * 2**20 / MB)),
        ("gradients", (60, 30, 60, 50)),
        ("parameters", (30, 30, 60, 100)),
    ],
)
def test_bytes_of_half_of_the_state(held, told) -> None:
    """Parts 5:3:2 of layers of 10, 20 and 30 MB with twice that of optimiser state; 4 samples of 3 kB."""
    profile = profile_of(10 * MB, 20 * MB, 30 * MB)
    plan = plan_of(profile, (4, 4, 4), (5, 3, 2), held, size=4)
    model = CostModel(fleet=fleet_of(), profile=profile)
    memory = owners_of(profile, model.bytes, plan).memory("a/0", 4)
    assert (memory.parameters, memory.gradients, memory.optimizer, memory.passing) == pytest.approx(
        [x * MB for x in told]
    )
    assert memory.activations == pytest.approx(4 * (3 * 1000 + 2 * 10))
    assert memory.total == pytest.approx(sum(told) * MB + memory.activations)
    assert play_owned(model, plan).memory_bytes["a/0"] == pytest.approx(memory.total)
    smaller = owners_of(profile, model.bytes, plan).memory("a/2", 4)
    assert smaller.optimizer == pytest.approx(0.2 * 120 * MB)


def test_a_device_without_samples_holds_its_part_and_no_more() -> None:
    """Of what passes only a unit of gradients that come in."""
    profile = profile_of(10 * MB, 20 * MB, 30 * MB)
    plan = plan_of(profile, (4, 0, 4), (1, 8, 1), "parameters")
    owners = owners_of(profile, CostModel(fleet=fleet_of(), profile=profile).bytes, plan)
    memory = owners.memory("a/1", 0)
    assert memory.activations == 0 and memory.optimizer == pytest.approx(0.8 * 120 * MB)
    assert memory.passing == pytest.approx(30 * MB)


def counted_profile(work: tuple[int, ...], scratch: int) -> Profile:
    """Layers of 10, 20 and 30 MB that save 1 MB a sample each, with these bytes of work and 1 MB a sample."""
    profile = profile_of(10 * MB, 20 * MB, 30 * MB)
    layers = tuple(
        replace(x, saved_bytes_per_sample=MB, work_bytes=w * MB, work_bytes_per_sample=MB)
        for x, w in zip(profile.layers, work, strict=True)
    )
    return replace(profile, layers=layers, update_bytes=scratch * MB)


@pytest.mark.parametrize(
    ("held", "work", "scratch", "told"),
    [
        # parameters, gradients, optimiser state, activations, passing, scratch in MB; layers' work includes
        # their gradients, which pass on the host otherwise. Last backward: 3 · 4 saved and 30 + 4 of work.
        ("optimizer", (10, 20, 30), 60, (60, 60, 60, 46, 0, 0)),
        ("gradients", (10, 20, 30), 60, (60, 30, 60, 0, 0, 30)),  # owners step: 30 + 30 beside 46
        ("gradients", (10, 20, 30), 20, (60, 0, 60, 46, 0, 0)),  # 30 + 10 beside 46
        ("parameters", (10, 20, 30), 60, (30, 0, 60, 46, 50, 0)),  # and 20 + 30 gathered around it
        ("parameters", (90, 20, 30), 60, (30, 0, 60, 98, 30, 0)),  # first: 4 + 90 + 4 with 10 + 20 around
        ("parameters", (10, 20, 30), 200, (30, 30, 60, 0, 0, 100)),
    ],
)
def test_where_memory_is_counted_the_higher_of_two_moments_counts(held, work, scratch, told) -> None:
    """Parts 5:3:2, 4 samples: a layer's backward with what is gathered around it, or the owner's step."""
    profile = counted_profile(work, scratch)
    plan = plan_of(profile, (4, 4, 4), (5, 3, 2), held, size=4)
    memory = owners_of(profile, CostModel(fleet=fleet_of(), profile=profile).bytes, plan).memory("a/0", 4)
    found = (memory.parameters, memory.gradients, memory.optimizer)
    found += (memory.activations, memory.passing, memory.update)
    assert found == pytest.approx([x * MB for x in told])
    assert memory.total == pytest.approx(sum(told) * MB)


def test_where_memory_is_counted_who_takes_no_samples_only_steps() -> None:
    profile = counted_profile((10, 20, 30), 60)
    plan = plan_of(profile, (4, 0, 4), (5, 3, 2), "parameters", size=4)
    memory = owners_of(profile, CostModel(fleet=fleet_of(), profile=profile).bytes, plan).memory("a/1", 0)
    assert memory.total == pytest.approx(0.3 * (60 + 60 + 120 + 60) * MB)


def test_tied_parameters_are_kept_once_and_stay_gathered() -> None:
    profile = profile_of(10 * MB, 20 * MB, 25 * MB, 10 * MB, tied={0: ("l3",), 3: ("l0",)})
    plan = plan_of(profile, (1, 1), (1, 1), "parameters")
    model = CostModel(fleet=fleet_of(), profile=profile)
    owners = owners_of(profile, model.bytes, plan)
    assert owners.once.tolist() == [10 * MB, 20 * MB, 25 * MB, 0]
    assert owners.gathers.tolist() == [10 * MB, 20 * MB, 25 * MB, 0] and owners.stays.tolist() == [1, 0, 0, 1]
    memory = owners.memory("a/0", 1)
    assert memory.parameters == pytest.approx(27.5 * MB)
    # Gradients of two neighbours and the tied one's till the end; parameters of those and the tied ones.
    assert memory.passing == pytest.approx((45 + 10 + 45 + 10) * MB)
    # Once in a forward and not in its backward: 0.5 s show; the second's second hides behind the first layer,
    # of the third's 1.25 s a quarter shows. The second comes again while the third runs back.
    assert play_owned(model, plan).gather_s["a/0"] == (pytest.approx((0.5 + 0.25, 0)),)


def test_a_tied_layer_is_in_no_unit_with_others() -> None:
    profile = profile_of(3 * MB, 2 * MB, 3 * MB, tied={0: ("l2",), 2: ("l0",)})
    owners = owners_of(
        profile,
        CostModel(fleet=fleet_of(), profile=profile).bytes,
        plan_of(profile, (1, 1), (1, 1), "parameters"),
    )
    assert owners.starts.tolist() == [0, 1, 2]


def test_small_layers_travel_together() -> None:
    profile = profile_of(3 * MB, 4 * MB, 4 * MB)
    plan = plan_of(profile, (1, 1), (1, 1), "parameters")
    owners = owners_of(profile, CostModel(fleet=fleet_of(), profile=profile).bytes, plan)
    assert owners.starts.tolist() == [0, 2] and owners.once.tolist() == [7 * MB, 4 * MB]


def test_seconds_of_owners_of_the_optimizer_s_state() -> None:
    """Two equal owners, one layer of 10 MB: parameters 0.5 s, 3 s of compute, gradients, half of 0.1 s."""
    profile = profile_of(10 * MB)
    plan = plan_of(profile, (1, 1), (1, 1), "optimizer")
    told = play_owned(CostModel(fleet=fleet_of(), profile=profile), plan)
    # Its gradients fill two buckets: the first leaves while the backward runs, 0.25 s of 5 MB show.
    assert told.step_s == pytest.approx(0.5 + 3 + 0.25 + 0.05)
    assert told.gather_s["a/0"] == (pytest.approx((0.5, 0)),)
    causes = told.seconds["a/0"]
    assert causes["compute"] == pytest.approx(3) and causes["reduce"] == pytest.approx(0.25)
    assert causes["transfer"] == pytest.approx(0.5) and causes["optimizer"] == pytest.approx(0.05)
    assert sum(causes.values()) == pytest.approx(told.step_s)


def test_what_is_kept_whole_comes_during_the_first_forward() -> None:
    """Two units: the second's 0.5 s hide behind the first's second of forward."""
    profile = profile_of(10 * MB, 10 * MB)
    plan = plan_of(profile, (1, 1), (1, 1), "optimizer")
    told = play_owned(CostModel(fleet=fleet_of(), profile=profile), plan)
    assert told.gather_s["a/0"] == (pytest.approx((0.5, 0)),)


def test_gradients_leave_in_every_round() -> None:
    """Two micro-batches: the first one's 0.5 s hide behind the second's forward, the second one's show."""
    profile = profile_of(10 * MB)
    plan = plan_of(profile, (2, 2), (1, 1), "gradients")
    told = play_owned(CostModel(fleet=fleet_of(), profile=profile), plan)
    assert told.step_s == pytest.approx(0.5 + 6 + 0.5 + 0.05)
    slow = CostModel(fleet=fleet_of(rate=MB), profile=profile)
    # 5 s of parameters, 3 of compute, twice 5 to owners: the second waits for the link.
    assert play_owned(slow, plan).step_s == pytest.approx(5 + 3 + 5 + 5 + 0.05)


def test_parameters_come_one_unit_ahead() -> None:
    """Three layers of 10 MB, 0.5 s each: the first shows, the others come while the one before computes.

    Backward: the last two stay, the first comes while the second runs back; its own gradients show.
    """
    profile = profile_of(10 * MB, 10 * MB, 10 * MB)
    plan = plan_of(profile, (1, 1), (1, 1), "parameters")
    told = play_owned(CostModel(fleet=fleet_of(), profile=profile), plan)
    assert told.step_s == pytest.approx(0.5 + 3 + 6 + 0.5 + 0.15)
    assert told.gather_s["a/0"] == (pytest.approx((0.5, 0)),)


def test_a_backward_waits_until_the_gradients_before_the_last_have_left() -> None:
    """10 s a unit: at most two are whole. The third from the end waits for both links' work before it."""
    profile = profile_of(10 * MB, 10 * MB, 10 * MB)
    model = CostModel(fleet=fleet_of(rate=0.5 * MB), profile=profile)
    told = play_owned(model, plan_of(profile, (1, 1), (1, 1), "gradients"))
    # 30 s until all parameters are there and 1 of the last forward; 2 of backward; its gradients 10 s. The
    # next one's backward hides behind them, the first's begins after them; two more times 10 s.
    assert told.step_s == pytest.approx(31 + 2 + 10 + 10 + 10 + 0.15)
    assert told.gather_s["a/0"][0][1] == pytest.approx(8), "33 to 43 less the second's 2 s"


def test_equal_rounds_are_as_long_as_the_one_before() -> None:
    profile = profile_of(10 * MB, 10 * MB)
    model = CostModel(fleet=fleet_of(rate=3 * MB), profile=profile)
    steps = [play_owned(model, plan_of(profile, (n, n), (1, 1), "parameters")).step_s for n in (4, 5, 6, 7)]
    assert steps[2] - steps[1] == pytest.approx(steps[1] - steps[0])
    assert steps[3] - steps[2] == pytest.approx(steps[1] - steps[0])


def test_who_has_no_samples_pulls_nothing() -> None:
    profile = profile_of(10 * MB, update_s=1.0)
    model = CostModel(fleet=fleet_of(), profile=profile)
    told = play_owned(model, plan_of(profile, (2, 0), (1, 9), "gradients"))
    # 9 MB from the owner, 6 s, 9 MB to it, 0.9 s of its update.
    assert told.step_s == pytest.approx(0.9 + 6 + 0.9 + 0.9)
    idle = told.seconds["a/1"]
    assert idle["compute"] == idle["transfer"] == 0 and sum(idle.values()) == pytest.approx(told.step_s)
    assert idle["wait"] == pytest.approx(6.9) and told.gather_s["a/1"] == ()


def test_owners_that_cannot_be_are_refused() -> None:
    profile = profile_of(10 * MB)
    plan = plan_of(profile, (1, 1), (1, 1), "gradients")
    other = replace(plan, owners=(Ownership(layer="l0", parts={"a/2": 1}),))
    with pytest.raises(PlanMismatchError, match="a/2"):
        play_owned(CostModel(fleet=fleet_of(), profile=profile), other)


def test_the_judge_of_plans_hands_them_over() -> None:
    profile = profile_of(10 * MB)
    model = CostModel(fleet=fleet_of(), profile=profile)
    plan = plan_of(profile, (2, 0), (1, 9), "parameters")
    judged, told = evaluate(model, plan), play_owned(model, plan)
    assert (judged.step_s, judged.seconds, judged.memory_bytes) == (
        told.step_s,
        told.seconds,
        told.memory_bytes,
    )


def test_values_do_not_wait_for_who_owns_none_of_them() -> None:
    """l0 of 5 MB is the first's, l1 of 10 MB the second's: of 6 s of update they take 2 and 4.

    l0 leaves 2 s before the second begins its forward, l1 is on its way for 1 s, which l0 takes: no wait.
    """
    profile = profile_of(5 * MB, 10 * MB, update_s=3.0)
    plan = plan_of(profile, (1, 1), (1, 1), "optimizer")
    parts = {"a/0": 1, "a/1": 0}, {"a/0": 0, "a/1": 1}
    owners = tuple(replace(o, parts=x) for o, x in zip(plan.owners, parts, strict=True))
    told = play_owned(CostModel(fleet=fleet_of(), profile=profile), replace(plan, owners=owners))
    assert told.gather_s["a/1"][0][0] == pytest.approx(0, abs=1e-2)
    assert told.gather_s["a/0"][0][0] == pytest.approx(2, abs=1e-2)
