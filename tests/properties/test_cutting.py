"""Any cut of any family computes what the uncut model does, and places everything once."""

import functools
import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from evener.errors import PlanMismatchError
from evener.runtime.cutting import cut, layer_names, legal_cuts
from tests.unit.runtime.cutting.families import (
    FAMILIES,
    batch,
    build,
    distance,
    first_tensor,
    forward,
    forward_backward,
    gradients,
    split,
)

RUNS = settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))


@functools.cache
def order(family: str) -> tuple[str, ...]:
    """The family's layers as they run."""
    points = legal_cuts(build(family), example=((batch(family, 2),), {}))
    assert all(p.legal for p in points)
    return (points[0].after, *(p.before for p in points))


def plain_loop(model: nn.Module, micro_batches: list) -> list:
    outputs = []
    for x in micro_batches:
        output = first_tensor(model(x))
        output.square().sum().backward()
        outputs.append(output.detach())
    return outputs


@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data())
@RUNS
def test_random_cuts_give_outputs_and_gradients_of_the_model(family: str, data: st.DataObject) -> None:
    names = order(family)
    points = st.sets(st.integers(1, len(names) - 1), min_size=1, max_size=min(4, len(names) - 1))
    stages = split(names, sorted(data.draw(points)))
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    length = data.draw(st.sampled_from([4, 8, 12]))
    training = data.draw(st.booleans())
    whole, cut_up = build(family).train(training), build(family).train(training)
    try:
        found = cut(cut_up, stages, example=((batch(family, 2),), {}))
    except PlanMismatchError as e:  # a stage of nothing but layers that run elsewhere
        assert "nothing to run" in str(e)
        return
    micro_batches = [batch(family, n, length=length) for n in sizes]
    torch.manual_seed(3)
    wanted = plain_loop(whole, micro_batches)
    torch.manual_seed(3)
    got = [forward_backward(found, (x,)) for x in micro_batches]
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    assert distance(gradients(cut_up), gradients(whole)) <= 1e-12
    for (name, a), (_, b) in zip(cut_up.named_buffers(), whole.named_buffers(), strict=True):
        assert torch.equal(a, b), f"buffer {name} went another way"
    placed_once(cut_up, found)


def placed_once(model: nn.Module, found) -> None:
    """The union of the stages is the model; what several stages hold is a tie."""
    everything = dict([*model.named_parameters(), *model.named_buffers()])
    held = [stage.named for stage in found.stages]
    assert {id(t) for h in held for t in h.values()} == {id(t) for t in everything.values()}
    tied = {holder for tie in found.ties for holder in tie}
    for name, tensor in everything.items():
        holders = {s for s, h in enumerate(held) if any(t is tensor for t in h.values())}
        if len(holders) > 1:
            assert isinstance(tensor, nn.Parameter), f"buffer {name} is in stages {holders}"
            assert {s for s, n in tied if everything.get(n, tensor) is tensor} >= holders


@pytest.mark.parametrize(
    ("num_layers", "num_stages"), [(n, s) for n, s in itertools.product((7, 30, 61), (2, 3, 4, 5))]
)
def test_the_union_of_the_stages_is_the_model(num_layers: int, num_stages: int) -> None:
    """K10's placement: 28 of 30 layers is not a model."""
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(num_layers)))
    edges = [round(num_layers * i / num_stages) for i in range(1, num_stages)]
    stages = split(layer_names(model), edges)
    found = cut(model, stages, example=((torch.randn(2, 3),), {}))
    assert [list(dict.fromkeys(n.split(".")[0] for n in s.named)) for s in found.stages] == stages
    assert sum(len(s.named) for s in found.stages) == 2 * num_layers
    assert found.ties == () and found.notes == ()
    x = torch.randn(5, 3)
    assert torch.equal(forward(found, (x,)), model(x))
