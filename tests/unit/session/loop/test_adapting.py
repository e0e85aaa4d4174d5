"""Between two steps: estimates on every device, a decision on one, the same plan on all."""

from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from evener.core.figures import line
from evener.core.job import Job
from evener.core.plan import Plan
from evener.planner import plan as make_plan
from evener.policy.adapt import Decision, Situation, decide_shares
from evener.session.loop.adapting import Adapter, adapter_of, handed_on
from evener.session.request import Request
from tests.fakes import ThreadedWire, together
from tests.unit.planner.small import fleet_of, linear_profile

FLEET, PROFILE = (
    fleet_of(["fast", "slow"], curve=line(1e-4, 1e9)),
    linear_profile({"fast": 0.004, "slow": 0.012}),
)
JOB = Job(global_batch=16, allow=("unlinked",))
NOW = Situation(fleet=FLEET, profile=PROFILE, job=JOB)
REQUEST = Request(fleet=FLEET, run_dir="")


def planned() -> Plan:
    return make_plan(FLEET, PROFILE, JOB).plan


def result(
    number: int, compute_s: dict[str, float], samples: dict[str, int], *, do: str = "apply", of: int = 16
):
    """What an adapter reads of a step."""
    totals = SimpleNamespace(compute_s=compute_s, samples=samples)
    return SimpleNamespace(number=number, samples=of, verdict=SimpleNamespace(do=do), totals=totals)


def usual(number: int, factor: float = 1.0, **more):
    """A step as planned, 12 and 4 samples, but for the first device, which takes `factor` times as long."""
    return result(number, {"h/0": 0.048 * factor, "h/1": 0.048}, {"h/0": 12, "h/1": 4}, **more)


def decide(plan: Plan, factors: dict[str, float], least: float) -> Decision:
    return decide_shares(plan, NOW, factors, least)


def test_two_slow_steps_are_answered_on_all_devices_alike_by_the_one_that_decides():
    def device(rank: int, wire: ThreadedWire) -> list:
        adapter = Adapter(wire, planned(), decide if rank == 0 else None)
        plan, decisions = planned(), []
        for number in range(8):
            decisions.append(adapter.after_step(plan, usual(number, 3.0 if number >= 4 else 1.0)))
            if decisions[-1]:
                break
        return decisions

    first, second = together(device, 2)
    assert first == second and first[:-1] == [None] * 5
    assert first[-1].plan.samples_by_device() == {"h/0": 8, "h/1": 8}
    assert first[-1].plan.prediction.factors == {"h/0": pytest.approx(3.0)}


def test_the_first_steps_small_batches_and_steps_that_do_not_count_are_not_looked_at():
    def device(rank: int, wire: ThreadedWire) -> list:
        adapter = Adapter(wire, planned(), decide)
        seen = [adapter.after_step(planned(), usual(number, 9.0)) for number in (0, 1)]
        seen += [adapter.after_step(planned(), usual(number, 9.0, of=3)) for number in (2, 3)]
        seen += [adapter.after_step(planned(), usual(number, 9.0, do="skip")) for number in (4, 5)]
        return [*seen, adapter.after_step(planned(), usual(6))]

    assert together(device, 1) == [[None] * 7]


def test_a_device_that_ran_more_than_it_was_given_is_not_taken_for_slow():
    def device(rank: int, wire: ThreadedWire) -> list:
        adapter = Adapter(wire, planned(), decide)
        stolen = {"h/0": 15, "h/1": 1}
        return [
            adapter.after_step(planned(), result(n, {"h/0": 0.060, "h/1": 0.012}, stolen)) for n in range(9)
        ]

    assert together(device, 1) == [[None] * 9]


def test_what_was_believed_when_the_plan_was_made_is_where_it_goes_on():
    plan = decide(planned(), {"h/0": 3.0}, 0.03).plan

    def device(rank: int, wire: ThreadedWire) -> tuple:
        adapter = Adapter(wire, plan, decide)
        slow = result(0, {"h/0": 0.096, "h/1": 0.096}, {"h/0": 8, "h/1": 8})
        fast = result(0, {"h/0": 0.032, "h/1": 0.096}, {"h/0": 8, "h/1": 8})
        kept = [adapter.after_step(plan, replaced(slow, n)) for n in range(5)]
        return kept, [adapter.after_step(plan, replaced(fast, n)) for n in (5, 6)]

    ((kept, answers),) = together(device, 1)
    assert kept == [None] * 5
    assert answers[0] is None and answers[1].plan.samples_by_device() == {"h/0": 12, "h/1": 4}


def replaced(step: SimpleNamespace, number: int) -> SimpleNamespace:
    return SimpleNamespace(**(vars(step) | {"number": number}))


def test_a_decision_travels_whole():
    made = decide(planned(), {"h/0": 3.0}, 0.03)
    got = together(lambda rank, wire: handed_on(wire, made if rank == 2 else None, "k"), 3)
    assert got == [made] * 3


def test_a_plan_stays_where_nothing_is_known_to_compare_with_and_the_reason_is_told():
    plan = planned()
    bare = replace(plan, prediction=None)
    cases = {
        "the user's own": (replace(REQUEST, batch_per_device={"h/0": 8, "h/1": 8}), plan),
        "predicts no seconds": (REQUEST, bare),
        "without its profile": (replace(REQUEST, plan=plan), plan),
    }
    for words, (request, given) in cases.items():
        adapter, why = adapter_of(request, FLEET, given, None, PROFILE)
        assert adapter is None and words in why
    assert adapter_of(replace(REQUEST, adapt=False), FLEET, plan, None, PROFILE) == (None, "")
    assert adapter_of(replace(REQUEST, plan=plan, profile=PROFILE), FLEET, plan, None, PROFILE)[0]


def test_a_look_further_gets_the_plan_then_in_force():
    asked = []

    def device(rank: int, wire: ThreadedWire) -> None:
        adapter = Adapter(wire, planned(), decide)
        adapter.look_further = lambda plan, factors: asked.append((plan.samples_by_device(), factors))
        for number in range(6):
            if adapter.after_step(planned(), usual(number, 3.0)):
                return

    together(device, 1)
    assert asked == [({"h/0": 8, "h/1": 8}, {"h/0": pytest.approx(3.0)})]
