"""Whether state is kept in parts, and what is said where it is not."""

from io import StringIO
from pathlib import Path

import pytest
from msgspec.structs import replace
from rich.console import Console

from evener.cli.plan import as_object, show
from evener.core.catalogue import read_fleet
from evener.core.figures import Figure
from evener.core.fleet import Fleet
from evener.core.job import Job
from evener.core.ownership import held_by
from evener.core.profile import Profile
from evener.core.transformer import transformer
from evener.cost.evaluate import CostModel, evaluate
from evener.cost.from_config import profile_from_config
from evener.cost.memory import usable_bytes
from evener.errors import NoPlanFitsError, UsageError
from evener.planner import plan
from evener.planner.groups import gib

FLEET = read_fleet(Path(__file__).parents[3] / "examples" / "fleets" / "8-4-2-2-memory-2-4-1-1.json")
JOB = Job(global_batch=64, state="auto")


def profile_on(fleet: Fleet) -> Profile:
    return profile_from_config(transformer("gpt2-medium"), fleet, global_batch=64)


def with_memory(gib: float) -> Fleet:
    """The fleet with 2, 4, 1 and 1 times so many GiB."""
    devices = tuple(
        replace(d, memory_bytes=Figure(value=gib * m * 2**30, source="assumed"))
        for d, m in zip(FLEET.devices, (2, 4, 1, 1), strict=True)
    )
    return replace(FLEET, devices=devices)


PROFILE = profile_on(FLEET)


def test_samples_by_speed_and_state_by_memory_is_faster_than_either_for_both() -> None:
    result = plan(FLEET, PROFILE, JOB)
    told = {a.name: a.step_s for a in result.alternatives}
    prediction = result.plan.prediction
    assert prediction is not None and held_by(result.plan) == "parameters"
    assert tuple(result.plan.samples_by_device().values()) == (32, 16, 8, 8)
    parts = result.plan.owners[0].parts
    assert max(parts, key=lambda n: parts[n]) == "lab1/b", "the large one, not the fast one, holds most"
    speed, memory = told["state and samples by speed"], told["state and samples by memory"]
    assert speed is not None and memory is not None
    assert prediction.step_s < 0.97 * speed and prediction.step_s < 0.6 * memory
    assert prediction.step_s < 0.5 * told["all state on every device that holds a layer"]
    for name, held in prediction.memory_bytes.items():
        assert held <= usable_bytes(FLEET.device(name), 0.1)
    assert evaluate(CostModel(fleet=FLEET, profile=PROFILE), result.plan).step_s == pytest.approx(
        prediction.step_s
    )
    assert "by memory" in result.plan.why and "by speed" in result.plan.why


def test_the_text_says_who_keeps_what_and_takes_no_samples() -> None:
    said = StringIO()
    result = plan(with_memory(3), PROFILE, replace(JOB, state="parameters"))
    show(result, Console(file=said, width=200))
    kept = result.plan.prediction.owned_bytes if result.plan.prediction else {}
    assert "state: parameters, gradients and the optimiser's state in parts" in said.getvalue()
    assert all(gib(b) in said.getvalue() for b in kept.values())
    assert as_object(result)["plan"]["owners"][0]["held"] == "parameters"


def test_the_more_memory_the_less_is_kept_in_parts() -> None:
    kept = [held_by(plan(with_memory(gib), PROFILE, JOB).plan) for gib in (4, 5, 6, 12)]
    assert kept == ["parameters", "gradients", "optimizer", None]


def test_pipelines_are_priced_against_it() -> None:
    result = plan(FLEET, PROFILE, JOB, shapes="all")
    whole = plan(FLEET, PROFILE, replace(JOB, state="replicated"), shapes="all")
    assert result.plan.prediction is not None and whole.plan.prediction is not None
    assert result.plan.prediction.step_s <= whole.plan.prediction.step_s * 1.006
    names = {a.name for a in result.alternatives}
    assert names & {
        "all state on every device that holds a layer",
        "parameters, gradients and the optimiser's state in unequal parts",
        "the optimiser's state in unequal parts, the model cut",
    }


def test_a_plan_that_leaves_small_devices_out_says_what_was_not_looked_at() -> None:
    reasons = plan(FLEET, PROFILE, replace(JOB, state="replicated")).reasons
    assert any("lab1/a, lab1/c, lab1/d cannot hold the model; --state auto" in r for r in reasons)
    assert not any("--state auto" in r for r in plan(FLEET, PROFILE, JOB).reasons)


def test_where_memory_suffices_nothing_changes() -> None:
    fleet = with_memory(100)
    assert plan(fleet, PROFILE, JOB) == plan(fleet, PROFILE, replace(JOB, state="replicated"))


def test_a_level_is_kept_to_where_it_is_asked_for() -> None:
    result = plan(with_memory(6), PROFILE, replace(JOB, state="gradients"))
    assert held_by(result.plan) == "gradients"
    with pytest.raises(NoPlanFitsError, match="optimiser's state in parts") as failed:
        plan(with_memory(1.5), PROFILE, replace(JOB, state="optimizer"))
    assert "--state auto" in failed.value.remedy
    with pytest.raises(UsageError, match="seconds by layer"):
        plan(FLEET, replace(PROFILE, timings=()), replace(JOB, state="optimizer"))


def test_a_refusal_names_what_would_fit_in_parts() -> None:
    with pytest.raises(NoPlanFitsError) as failed:
        plan(with_memory(1.5), PROFILE, replace(JOB, state="replicated"))
    assert "--state auto: parameters, gradients and the optimiser's state in unequal parts over" in (
        failed.value.remedy
    )
    with pytest.raises(NoPlanFitsError) as failed:
        plan(with_memory(0.5), PROFILE, JOB)
    assert "to be kept" in failed.value.numbers


def test_a_given_split_and_a_given_micro_batch_are_kept() -> None:
    given = dict(zip((d.name for d in FLEET.devices), (40, 24, 0, 0), strict=True))
    result = plan(with_memory(6), PROFILE, replace(JOB, state="optimizer", batch_per_device=given))
    assert {n: k for n, k in result.plan.samples_by_device().items() if k} == {"lab1/a": 40, "lab1/b": 24}
    small = plan(with_memory(6), PROFILE, replace(JOB, state="optimizer", micro_batch=1)).plan
    assert {p.micro_batch for p in small.pipelines} == {1}
    every = plan(with_memory(6), PROFILE, replace(JOB, state="optimizer", keep_all=True)).plan
    assert min(every.samples_by_device().values()) >= 1 and len(every.devices) == 4


def test_money_is_an_aim_too() -> None:
    priced = replace(
        FLEET,
        devices=tuple(
            replace(d, price_per_hour=Figure(value=p, source="table"))
            for d, p in zip(FLEET.devices, (1.0, 1.0, 9.0, 9.0), strict=True)
        ),
    )
    result = plan(priced, PROFILE, replace(JOB, objective="money"))
    assert set(result.plan.devices) <= {"lab1/a", "lab1/b"}
