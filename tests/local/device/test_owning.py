"""State in parts on rehearsed accelerators: memory that is let go is free, and steps are exact."""

from pathlib import Path

import pytest
import torch
from torch import nn

from evener.core.figures import line
from evener.core.plan import Held, Ownership, Pipeline, Plan, Share, Stage
from evener.core.routes import Routes
from evener.rehearsal.device.clock import Clock
from evener.runtime.owning.means import Means
from evener.runtime.owning.owned import Owned
from evener.runtime.owning.post import GroupPost
from evener.runtime.ranks import Ranks
from evener.runtime.wire import SoloWire
from evener.session.exactness.verify import verify
from tests.local.device.comparing import raises
from tests.local.device.opening import card_of
from tests.local.device.test_job import fleet, request_for
from tests.local.pool import Pool


def let_go_and_taken_back(rank: int, world_size: int) -> None:
    card_of(memory=25e6)
    base = torch.accelerator.memory_allocated()
    flat = torch.ones(2**20, device="rehearsal")  # 4 MiB
    view = flat[: 2**19].view(2, -1)
    held = torch.accelerator.memory_allocated()
    assert held - base == 4 * 2**20
    flat.untyped_storage().resize_(0)
    assert torch.accelerator.memory_allocated() == base
    other = torch.ones(2**20, device="rehearsal")
    raises(torch.OutOfMemoryError, "Tried to allocate", lambda t=flat: t.untyped_storage().resize_(2**25))
    del other
    flat.untyped_storage().resize_(4 * 2**20)
    assert torch.accelerator.memory_allocated() == held
    flat.fill_(3.0)
    assert view.cpu().eq(3).all(), "views share the memory that came back"
    del flat
    assert torch.accelerator.memory_allocated() == held
    del view
    assert torch.accelerator.memory_allocated() == base


def moved_between_forward_and_backward(rank: int, world_size: int) -> None:
    card_of(memory=25e6)
    layer = torch.nn.Linear(4, 4).to("rehearsal")
    flat = torch.ones(16, device="rehearsal")
    layer.weight.data = flat.view(4, 4)
    x = torch.ones(2, 4, device="rehearsal", requires_grad=True)
    y = layer(x)
    layer.weight.data = torch.full((1,), float("nan"), device="rehearsal").expand(4, 4)
    flat.untyped_storage().resize_(0)
    flat.untyped_storage().resize_(64)
    flat.fill_(2.0)
    layer.weight.data = flat.view(4, 4)
    y.sum().backward()
    assert x.grad is not None and x.grad.cpu().eq(8.0).all()


def test_a_parameter_may_be_elsewhere_between_its_forward_and_its_backward(pool: Pool) -> None:
    pool.run(moved_between_forward_and_backward, 1)


def test_a_storage_that_is_let_go_takes_no_memory_of_the_device(pool: Pool) -> None:
    pool.run(let_go_and_taken_back, 1)


def gradients_of_small_layers_leave_as_one(rank: int, world_size: int) -> None:
    layers = nn.Sequential(nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 50))
    gradients_leave_a_lone_card(layers, ("0", "2"), [2 * 51 * 50 * 4])


def gradients_of_a_large_layer_leave_one_by_one(rank: int, world_size: int) -> None:
    copies = [45_000 * 4, 45_000 * 50 * 4]
    gradients_leave_a_lone_card(nn.Sequential(nn.Linear(50, 45_000)), ("0",), copies, "parameters")


def gradients_leave_a_lone_card(
    model: nn.Sequential, owned_layers: tuple[str, ...], copies: list[int], held: Held = "gradients"
) -> None:
    """In a backward, one copy of each of these bytes to the host, told as transfer, at 5 ms + 100 MB/s.

    Values, which nobody else asks for, stay on the card.
    """
    from evener.rehearsal.device.driver import CardDriver

    card = card_of(link=line(5e-3, 1e8), clock=Clock(host_counts=False))
    name, layers = card.device.name, tuple(str(i) for i in range(len(model)))
    stage = Stage(layers=layers, shares=(Share(devices=(name,), samples=4),))
    plan = Plan(
        global_batch=4,
        schedule="1f1b",
        pipelines=(Pipeline(samples=4, micro_batch=4, stages=(stage,)),),
        owners=tuple(Ownership(layer=x, parts={name: 1}, held=held) for x in owned_layers),
    )
    model = model.to("rehearsal")
    means = Means(
        ranks=Ranks((name,), name),
        post=GroupPost(None, (name,)),
        wire=SoloWire(),
        device=card.torch_device,
        now=CardDriver(card).now,
    )
    owned = Owned(model, torch.optim.SGD(model.parameters(), lr=0.1), plan, means)
    owned.begin_step(0, Routes(plan), trains=True)
    (gradients,) = owned.gradients.values()
    gradients.begin(1.0)
    model(torch.ones(4, 50, device="rehearsal")).sum().backward()
    waits = owned.take_waits()
    assert {(action, cause) for action, _, _, cause in waits} == {("OFFLOAD0", "transfer")}
    assert sorted(end - begin for _, begin, end, _ in waits) == pytest.approx(
        [5e-3 + n / 1e8 for n in copies]
    )
    gradients.launch_rest(0)
    gradients.wait()
    gradients.finish()
    grads = [piece.values.grad for pieces in owned.pieces.values() for piece in pieces]
    assert len(grads) == 2 * len(owned_layers)
    assert all(g is not None and g.device.type == "rehearsal" for g in grads)
    since = means.now()
    owned.parameters.after_move()
    assert means.now() == since
    owned.close()


def test_gradients_of_a_unit_of_small_layers_leave_an_accelerator_as_one_copy(pool: Pool) -> None:
    pool.run(gradients_of_small_layers_leave_as_one, 1)


def test_gradients_of_a_large_layer_leave_an_accelerator_as_they_come(pool: Pool) -> None:
    pool.run(gradients_of_a_large_layer_leave_one_by_one, 1)


@pytest.mark.parametrize("state", ["optimizer", "parameters"])
def test_two_cards_with_unequal_parts_train_one_model_exactly(tmp_path: Path, state: str) -> None:
    split, parts = {"lab/gpu0": 67, "lab/gpu1": 29}, {"lab/gpu0": 2, "lab/gpu1": 5}
    asked = request_for(tmp_path, fleet(), batch_per_device=split, steps=3, state=state, parts=parts)
    found = verify(asked)
    assert found is not None and found.exact
    assert found.plan.owners and found.plan.owners[0].parts == parts
    assert found.gradient_error_float64 < 1e-12 and found.parameter_error_float64 < 1e-10
