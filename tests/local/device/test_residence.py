"""Jobs on rehearsed cards whose parameters or optimiser live on the host: exact, within the card's memory."""

from pathlib import Path

import pytest
from msgspec.structs import replace
from safetensors.torch import load_file

from evener.core.figures import Figure
from evener.core.fleet import Device, Fleet
from evener.core.plan import Pipeline, Plan, Share, Stage
from evener.session.checkpoints.save_rule import Keep, rule_of
from evener.session.exactness.verify import verify
from evener.session.launching.launch import launch
from tests.local.device.test_job import NAMES, fleet, request_for

HOST = Device(
    name="lab/cpu",
    kind="host",
    bytes_per_s=Figure(value=4e8, source="assumed"),
    memory_bytes=Figure(value=1e9, source="assumed"),
)


def stage(
    names: list[str], device: str, residence: str | None, *, recompute: bool = False, on_disk: bool = False
) -> Stage:
    return Stage(
        layers=tuple(names),
        shares=(Share(devices=(device,), samples=8),),
        residence=residence,
        recompute=recompute,
        state_on_disk=on_disk,
    )


def pipeline(*residences: str | None, recompute: bool = False, on_disk: bool = False) -> Plan:
    stages = (
        stage(NAMES[:3], "lab/gpu0", residences[0], recompute=recompute, on_disk=on_disk),
        stage(NAMES[3:], "lab/gpu1", residences[1]),
    )
    return Plan(
        global_batch=96, pipelines=(Pipeline(samples=96, micro_batch=8, stages=stages),), schedule="1f1b"
    )


def side_by_side(*residences: str | None) -> Plan:
    pipelines = tuple(
        Pipeline(samples=n, micro_batch=8, stages=(stage(NAMES, device, residence),))
        for n, device, residence in zip((64, 32), ("lab/gpu0", "lab/gpu1"), residences, strict=True)
    )
    return Plan(global_batch=96, pipelines=pipelines)


@pytest.mark.parametrize(
    "plan",
    [
        pipeline("host", "host-optimizer"),
        pipeline("host", None, recompute=True, on_disk=True),
        side_by_side("host", "host"),
        side_by_side("host-optimizer", None),
    ],
    ids=["host | optimizer", "host recomputed, state on disk | device", "host + host", "optimizer + device"],
)
def test_steps_are_those_of_one_device(tmp_path: Path, plan: Plan) -> None:
    found = verify(request_for(tmp_path, fleet(), plan=plan, steps=2))
    assert found is not None and found.exact
    assert found.gradient_error_float64 < 1e-12 and found.parameter_error_float64 < 1e-10


def small(memory: float) -> Fleet:
    cards = fleet(smaller=64.0)
    own = Figure(value=memory, source="assumed")
    card = replace(cards.devices[0], memory_bytes=own, free_memory_bytes=None, framework_bytes=None)
    return replace(cards, devices=(card,), hosts=(HOST,))


def test_a_model_larger_than_its_card_trains_on_it_and_is_the_users_own(tmp_path: Path) -> None:
    """Parameters, gradients and state are 3.9 MB; the card has 3.2 MB. A run goes on from its checkpoint."""
    one, two, all_at_once = (tmp_path / name for name in ("one", "two", "whole"))
    for folder in (one, two, all_at_once):
        folder.mkdir()
    rule = rule_of("2", Keep(last=2, every=0))
    first = launch(request_for(one, small(3.2e6), steps=2, checkpoint=rule, shapes="auto"))
    (_, _, used), *_ = first.plan.numbered_stages()
    assert used.residence == "host"
    assert first.peak_bytes["lab/gpu0"].value <= 3.2e6
    assert first.plan.prediction is not None
    told = first.plan.prediction.memory_bytes["lab/gpu0"]
    assert told == pytest.approx(first.peak_bytes["lab/gpu0"].value, rel=0.05)
    resumed = launch(request_for(two, small(3.2e6), steps=4, plan=first.plan, resume=str(one)))
    whole = launch(request_for(all_at_once, small(3.2e6), steps=4, plan=first.plan))
    ours, wanted = (load_file(Path(x.run_dir) / "model.safetensors") for x in (resumed, whole))
    assert list(ours) == list(wanted) == [f"{n}.{k}" for n in (0, 2, 4) for k in ("bias", "weight")]
    for name, tensor in wanted.items():
        assert (ours[name] - tensor).abs().max() <= 1e-6


def test_a_card_with_room_for_parameters_and_gradients_keeps_its_optimizer_away(
    tmp_path: Path,
) -> None:
    run = launch(request_for(tmp_path, small(3.7e6), steps=2, shapes="auto"))
    (_, _, used), *_ = run.plan.numbered_stages()
    assert used.residence == "host-optimizer"
    assert run.peak_bytes["lab/gpu0"].value <= 3.7e6
