"""Seconds and bytes of plans of stages whose state is in parts, by hand."""

import pytest

from evener.core.figures import line
from evener.core.fleet import Device, Fleet, Link
from evener.core.plan import Held, Ownership, Pipeline, Plan, Share, Stage
from evener.cost.actions import plan_costs
from evener.cost.evaluate import evaluate
from evener.cost.model import CostModel
from evener.errors import PlanMismatchError
from tests.unit.cost.test_owned import MB, counted_profile, profile_of

NAMES = ("a/0", "a/1", "a/2", "a/3")


def model_of(profile=None) -> CostModel:
    devices = tuple(Device(name=n, kind="k") for n in NAMES)
    fleet = Fleet(devices=devices, links=(Link(a="a", b="a", curve=line(1e-9, 10 * MB)),))
    return CostModel(fleet=fleet, profile=profile or profile_of(10 * MB, 10 * MB))


def hybrid(held: Held | None, *parts: int, samples: int = 1, layers=(("l0",), ("l1",))) -> Plan:
    """Pipelines a/0, a/1 and a/2, a/3, cut alike; `parts` are those of the devices in this order."""

    def pipeline(names: tuple[str, ...]) -> Pipeline:
        stages = tuple(
            Stage(layers=run, shares=(Share(devices=(d,), samples=1),))
            for run, d in zip(layers, names, strict=True)
        )
        return Pipeline(samples=samples, micro_batch=1, stages=stages)

    part = dict(zip(NAMES, parts, strict=False))
    owners = tuple(
        Ownership(layer=x, parts={d: part[d] for d in (NAMES[k], NAMES[k + 2])}, held=held)
        for k, run in enumerate(layers)
        for x in run
        if held
    )
    pipelines = pipeline(NAMES[:2]), pipeline(NAMES[2:])
    return Plan(global_batch=2 * samples, pipelines=pipelines, schedule="1f1b", owners=owners)


def test_a_step_of_two_pipelines_whose_state_is_in_halves() -> None:
    """Layers of 10 MB, 1 s and 2 s; 5 MB go each way at 10 MB/s.

    Half an update 0.05, values of the first layer 0.5 behind it, forwards 2 s (those of the second layer came
    meanwhile), backwards 4 s; 10 MB of gradients leave in two pieces of 0.25, the second behind the backward.
    """
    model = model_of()
    own_s = model.trainer.step_s
    found = evaluate(model, hybrid("optimizer", 1, 1, 1, 1))
    assert found.step_s == pytest.approx(0.05 + own_s + 0.5 - own_s + 6.0 + 0.25, rel=1e-4)
    causes = found.seconds["a/0"]
    assert causes["optimizer"] == pytest.approx(0.05)
    assert causes["transfer"] == pytest.approx(0.5 - own_s, rel=1e-4)
    assert found.seconds["a/1"]["transfer"] == 0.0
    assert all(sum(row.values()) == pytest.approx(found.step_s) for row in found.seconds.values())


def test_who_owns_nothing_of_its_stage_steps_nothing_and_waits_for_who_owns_all() -> None:
    costs = plan_costs(model_of(), hybrid("optimizer", 1, 1, 0, 1))
    assert costs.update_s == pytest.approx({"a/0": 0.1, "a/1": 0.05, "a/2": 0.0, "a/3": 0.05})
    # a/0 gets nothing: what it waits for is its own port, busy with 10 MB to a/2; both wait for it
    waits = {d: costs.gather_s[stage, d, "F", 0] for stage, d in ((0, "a/0"), (2, "a/2"))}
    assert waits["a/2"] == pytest.approx(waits["a/0"] + 0.1)


@pytest.mark.parametrize("held", ["optimizer", "gradients"])
@pytest.mark.parametrize("counted", [False, True])
def test_memory_is_less_by_what_others_keep(held: Held, counted: bool) -> None:
    """The first layer of 10 MB in parts 3:1: of 20 MB of state 15 stay on one and 5 on the other."""
    profile = counted_profile((10, 20, 30), 0) if counted else profile_of(10 * MB, 20 * MB, 30 * MB)
    model, layers = model_of(profile), (("l0",), ("l1", "l2"))
    whole = evaluate(model, hybrid(None, layers=layers)).memory_bytes
    found = evaluate(model, hybrid(held, 3, 1, 1, 0, layers=layers)).memory_bytes
    state = float(model.bytes.optimizer[1])
    least = {"a/0": 0.25 * state, "a/2": 0.75 * state, "a/1": 0.0}
    for name, spared in least.items():
        assert found[name] <= whole[name] - spared + 1
    if held == "optimizer":
        assert {d: whole[d] - found[d] for d in least} == pytest.approx(least)


def test_gradients_that_take_longer_than_a_micro_batch_keep_the_next_one_waiting() -> None:
    """40 MB a unit: 20 MB at 10 MB/s are 2 s behind 3 s of compute: nothing shows; 80 MB: 4 s, 1 s shows."""
    for size, shows in ((40, 0.0), (80, 1.0)):
        model = model_of(profile_of(size * MB, 10 * MB))
        costs = plan_costs(model, hybrid("gradients", 1, 1, 1, 1, samples=3))
        waits = [costs.gather_s.get((0, "a/0", "B", m), 0.0) for m in range(3)]
        assert waits == pytest.approx([0.0, shows, shows], abs=1e-3)
        alike = plan_costs(model, hybrid("optimizer", 1, 1, 1, 1, samples=3))
        assert not [key for key in alike.gather_s if key[2] == "B"]


def test_parameters_in_parts_have_no_price_in_stages() -> None:
    with pytest.raises(PlanMismatchError, match="alive at once"):
        evaluate(model_of(), hybrid("parameters", 1, 1, 1, 1))
