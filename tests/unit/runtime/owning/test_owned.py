"""What a device owns, and what happens when a step goes wrong on one of them."""

from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from evener.core.plan import Ownership
from evener.errors import ModelError, PeerLostError, PlanMismatchError, ReductionMismatchError
from evener.runtime.owning.optimizer import cannot_cut
from evener.runtime.owning.units import units_of_model
from tests.fakes import PostOffice, together
from tests.owning import Device, Job, Tied, chain, on_one
from tests.reference import relative_error

JOB = Job(parts=(5, 3, 2), micro_batches=((8, 4), (6, 3), (2, 1)))
HELD = ("optimizer", "gradients", "parameters")


def with_held(held: str, **more: Any) -> Job:
    return Job(**{**{f: getattr(JOB, f) for f in JOB.__dataclass_fields__}, "held": held, **more})


def run(job: Job, work: Any) -> list[Any]:
    """`work(device)` on a thread a device; one that fails leaves, as a process would."""
    office = PostOffice()

    def on(rank: int, wire: Any) -> Any:
        try:
            return work(Device(job, job.names[rank], office.post(job.names[rank]), wire))
        except BaseException as e:
            office.leave(f"device {rank} failed: {type(e).__name__}: {e}")
            raise

    return together(on, len(job.parts))


def test_values_are_cut_anywhere_and_every_one_has_one_owner():
    job = Job(parts=(5, 3, 2), micro_batches=((1, 1),) * 3, make_model=lambda: nn.Linear(4, 10, bias=False))
    (unit,) = units_of_model(job.model(), job.plan())
    assert unit.spans == {"lab/0": (0, 20), "lab/1": (20, 32), "lab/2": (32, 40)}
    (name, _, span) = next(unit.pieces_of("lab/1"))
    assert (name, span) == ("weight", (20, 32))  # rows 5, 6 and 7 of 10


def test_a_device_with_part_0_owns_nothing():
    job = Job(parts=(1, 0), micro_batches=((1, 1),) * 2)
    for unit in units_of_model(job.model(), job.plan()):
        assert list(unit.pieces_of("lab/1")) == [] and unit.owners() == ("lab/0",)


def test_parameters_that_are_not_cut_go_whole_to_whom_most_is_owed():
    job = Job(parts=(3, 1), micro_batches=((1, 1),) * 2, make_model=lambda: chain((8,) * 9))
    model = job.model()
    units = units_of_model(model, job.plan(), whole=[n for n, _ in model.named_parameters()])
    owned = {d: sum(u.sizes[d] for u in units) for d in job.names}
    assert owned["lab/0"] / sum(owned.values()) == pytest.approx(0.75, abs=0.07)
    for unit in units:
        pieces = [piece for d in job.names for piece in unit.pieces_of(d)]
        assert all(high - low == p.numel() for _, p, (low, high) in pieces)
        assert {n for n, _, _ in pieces} == set(unit.named)


def test_what_needs_whole_matrices_is_found_out_by_trying():
    def cut(make: Any) -> bool:
        p = nn.Parameter(torch.ones(4, 4))
        return not cannot_cut(make([p]))

    for make in (torch.optim.AdamW, torch.optim.Adagrad, torch.optim.Rprop, torch.optim.NAdam):
        assert cut(make), make
    assert cut(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    assert not cut(torch.optim.Adafactor)
    assert not cut(lambda p: torch.optim.Muon(p, lr=0.1))
    assert not cut(torch.optim.LBFGS)


def test_groups_by_shape_stay_what_the_user_made_them():
    def by_shape(parameters: Any) -> torch.optim.Optimizer:
        matrices = [p for p in parameters if p.ndim > 1]
        rest = [p for p in parameters if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": 0.5}, {"params": rest, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=1e-2)

    job = with_held("gradients", optimizer=by_shape, dtype=torch.float64)
    want = on_one(job)

    def train(device: Device) -> list[torch.Tensor]:
        for number, batch in enumerate(job.batches()):
            device.step(number, batch)
        return device.whole()

    for parameters in run(job, train):
        assert relative_error(parameters, want.parameters) < 1e-12


@pytest.mark.parametrize("change", ["strange layer", "strange device", "left out", "two kinds"])
def test_owners_that_do_not_fit_the_plan_are_refused(change: str):
    plan = JOB.plan()
    first = plan.owners[0]
    owners = {
        "strange layer": (replace(first, layer="nowhere"), *plan.owners[1:]),
        "strange device": (replace(first, parts={"lab/9": 1}), *plan.owners[1:]),
        "left out": plan.owners[1:],
        "two kinds": (replace(first, held="parameters"), *plan.owners[1:]),
    }[change]
    office = PostOffice()
    with pytest.raises(PlanMismatchError) as e:
        Device(JOB, "lab/0", office.post("lab/0"), None, replace(plan, owners=owners))  # type: ignore[arg-type]
    words = {
        "strange layer": "nowhere",
        "strange device": "lab/9",
        "left out": f"leave out {first.layer}",
        "two kinds": "optimizer and parameters",
    }
    assert words[change] in str(e.value)


def test_parts_that_are_all_0_or_below_are_no_ownership():
    for parts in ({"a": 0, "b": 0}, {"a": -1, "b": 2}):
        with pytest.raises(ValueError, match="0 or more and not all 0"):
            Ownership(layer="x", parts=parts)


@pytest.mark.parametrize("held", HELD)
def test_a_device_without_memory_in_mid_forward_makes_all_redo_the_step(held: str):
    job = with_held(held, dtype=torch.float64, steps=1)
    want = on_one(job)

    def train(device: Device) -> tuple[str, list[torch.Tensor]]:
        failed = []

        def full(*_: Any) -> None:
            if device.here == "lab/1" and not failed:
                failed.append(True)
                raise torch.OutOfMemoryError("no room")

        device.model[4].register_forward_hook(full)  # type: ignore[index]
        (batch,) = job.batches()
        first = device.step(0, batch).verdict.do
        assert device.step(0, batch).verdict.do == "apply"
        return first, device.whole()

    for first, parameters in run(job, train):
        assert first == "shrink"
        assert relative_error(parameters, want.parameters) < 1e-12


@pytest.mark.parametrize("held", HELD)
def test_a_step_with_nan_leaves_nothing_behind(held: str):
    job = with_held(held, dtype=torch.float64, steps=1)
    want = on_one(job)

    def train(device: Device) -> tuple[str, list[torch.Tensor]]:
        (batch,) = job.batches()
        broken = batch[0].clone()
        broken[0] = float("nan")
        first = device.step(0, (broken, batch[1])).verdict.do
        device.step(1, batch)
        return first, device.whole()

    for first, parameters in run(job, train):
        assert first == "skip"
        assert relative_error(parameters, want.parameters) < 1e-12


@pytest.mark.parametrize("held", HELD)
def test_a_device_that_leaves_in_mid_step_is_a_lost_peer_to_the_others(held: str):
    seen: list[BaseException] = []

    def train(device: Device) -> None:
        if device.here == "lab/2":
            device.model[2].register_forward_hook(_leave)  # type: ignore[index]
        try:
            device.step(0, JOB.batches()[0])
        except PeerLostError as e:
            seen.append(e)
            raise

    with pytest.raises((PeerLostError, ModelError)):
        run(with_held(held), train)
    assert len(seen) == 2 and all("gone" in str(e) or "failed" in str(e) for e in seen)


def _leave(*_: Any) -> None:
    raise RuntimeError("gone")


def test_devices_in_different_steps_are_both_named():
    def train(device: Device) -> None:
        device.step(4 if device.here == "lab/1" else 3, JOB.batches()[0])

    with pytest.raises(ReductionMismatchError) as e:
        run(with_held("gradients"), train)
    assert "added up step" in e.value.what and "lab/1" in str(e.value)


def test_a_layer_that_runs_twice_cannot_be_gathered_again():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c, self.d = (nn.Linear(6, 6) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.d(self.c(self.a(self.b(self.a(self.b(self.a(x)))))))

    job = with_held("parameters", make_model=Twice, micro_batches=((2, 2), (2, 2), (2, 2)))
    with pytest.raises(ModelError, match="more often than once"):
        run(job, lambda device: device.step(0, job.batches()[0]))


def test_tied_and_frozen_weights_and_idle_ones_in_parts_of_parameters():
    job = with_held("parameters", make_model=Tied, dtype=torch.float64)
    want = on_one(job)

    def train(device: Device) -> tuple[list[str], list[torch.Tensor]]:
        for number, batch in enumerate(job.batches()):
            device.step(number, batch)
        hidden = [n for n, p in device.model.named_parameters() if not torch.isfinite(p).all()]
        return hidden, device.whole()

    for hidden, parameters in run(job, train):
        assert hidden, "between steps parameters are elsewhere"
        assert relative_error(parameters, want.parameters) < 1e-12
