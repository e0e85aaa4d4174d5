"""BatchNorm over a wave, devices as threads, against plain BatchNorm over the merged micro-batches."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from evener.core.split import spans_of
from evener.errors import ModelError
from evener.runtime.batchnorm import (
    WaveBatchNorm,
    hand_out_statistics,
    keeping_statistics,
    replace_batchnorm,
    wave,
    wave_layers,
)
from tests.fakes import ThreadedWire, together

Batch = tuple[torch.Tensor, torch.Tensor]


def convolutional(momentum: float | None = 0.1, *, affine: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3),
        nn.BatchNorm2d(4, momentum=momentum, affine=affine),
        nn.ReLU(),
        nn.Conv2d(4, 3, 2, bias=False),
        nn.BatchNorm2d(3, momentum=momentum, affine=affine),
        nn.Flatten(),
        nn.Linear(27, 5),
        nn.BatchNorm1d(5, momentum=momentum, affine=affine),
    ).double()


def batch(size: int, seed: int) -> Batch:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 2, 6, 6, generator=g, dtype=torch.float64)
    return 3 + 2 * x, torch.randn(size, 5, generator=g, dtype=torch.float64)


def loss_of(model: nn.Module, given: Batch) -> torch.Tensor:
    return (model(given[0]) * given[1]).sum()


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Gradients and buffers."""
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return grads | {n: b.clone() for n, b in model.named_buffers()}


def plain(model: nn.Module, waves: list[Batch]) -> dict[str, torch.Tensor]:
    """The reference: one device runs each merged wave."""
    for given in waves:
        loss_of(model, given).backward()
    return state(model)


def in_waves(model: nn.Module, waves: list[Batch], sizes: list[tuple[int, ...]]) -> list[dict]:
    """State of each device after the waves, device d taking sizes[m][d] samples of wave m."""

    def work(rank: int, wire: ThreadedWire) -> dict[str, torch.Tensor]:
        mine = copy.deepcopy(model)
        replace_batchnorm(mine)
        for (x, y), parts in zip(waves, sizes, strict=True):
            start, stop = spans_of(parts)[rank]
            place = wave(mine, wire)
            with place:
                loss = loss_of(mine, (x[start:stop], y[start:stop]))
            with place:
                loss.backward()
        return state(mine)

    return together(work, len(sizes[0]))


def assert_is_reference(found: list[dict], reference: dict[str, torch.Tensor], bound: float = 1e-12) -> None:
    """Gradients add up over devices, statistics are the same on all."""
    grads = [n for n in reference if n.endswith(("weight", "bias"))]
    ours = torch.cat([sum(f[n] for f in found).flatten() for n in grads])  # type: ignore[union-attr, misc]
    theirs = torch.cat([reference[n].flatten() for n in grads])
    assert (ours - theirs).norm() <= bound * theirs.norm()
    for name in reference.keys() - set(grads):
        for f in found:
            assert torch.equal(f[name], found[0][name])
        torch.testing.assert_close(found[0][name], reference[name], rtol=bound, atol=bound)


@pytest.mark.parametrize("sizes", [[(3, 2), (1, 4)], [(2, 2, 1)], [(1, 1)], [(7, 1), (2, 6), (4, 4)]])
def test_a_wave_is_the_merged_micro_batch(sizes: list[tuple[int, ...]]) -> None:
    waves = [batch(sum(s), seed) for seed, s in enumerate(sizes)]
    assert_is_reference(in_waves(convolutional(), waves, sizes), plain(convolutional(), waves))


def test_plain_batchnorm_would_fail_this() -> None:
    waves = [batch(5, 0)]
    reference = plain(convolutional(), waves)
    alone = [plain(convolutional(), [(waves[0][0][a:b], waves[0][1][a:b])]) for a, b in ((0, 3), (3, 5))]
    with pytest.raises(AssertionError):
        assert_is_reference(alone, reference, bound=1e-3)


@pytest.mark.parametrize(
    "made",
    [
        lambda: convolutional(None),
        lambda: convolutional(affine=False),
        lambda: _frozen(convolutional()),
        lambda: _untracked(convolutional()),
        lambda: nn.Sequential(nn.BatchNorm2d(2), *convolutional()).double(),
    ],
    ids=["cumulative", "without weights", "frozen weights", "no running statistics", "first of all"],
)
def test_variants(made: Callable[[], nn.Module]) -> None:
    waves, sizes = [batch(5, 0), batch(4, 1)], [(3, 2), (1, 3)]
    assert_is_reference(in_waves(made(), waves, sizes), plain(made(), waves))


def _frozen(model: nn.Sequential) -> nn.Sequential:
    for parameter in [*model[0].parameters(), *model[1].parameters()]:
        parameter.requires_grad_(False)
    return model


def _untracked(model: nn.Sequential) -> nn.Sequential:
    model[4] = nn.BatchNorm2d(3, track_running_stats=False).double()
    return model


def test_float32_with_a_large_mean_keeps_its_variance() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 5))
    x = 1000 + torch.randn(8, 3)
    sizes = [(5, 3)]
    waves = [(x, torch.randn(8, 5))]
    assert_is_reference(in_waves(model, waves, sizes), plain(copy.deepcopy(model), waves), bound=1e-4)


class Recomputed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


def test_recomputed_layers_take_the_statistics_of_their_first_run() -> None:
    def model() -> nn.Module:
        layers = convolutional()
        return nn.Sequential(Recomputed(layers[:3]), Recomputed(layers[3:]))

    waves, sizes = [batch(5, 0)], [(3, 2)]
    reference = plain(convolutional(), waves)
    found = [{n.split(".", 2)[2]: t for n, t in f.items()} for f in in_waves(model(), waves, sizes)]
    assert_is_reference(found, reference)


def test_a_backward_in_two_parts_sums_once() -> None:
    model, given = convolutional(), batch(5, 0)

    def work(rank: int, wire: ThreadedWire) -> tuple[list[torch.Tensor], int]:
        mine = copy.deepcopy(model)
        replace_batchnorm(mine)
        start, stop = ((0, 3), (3, 5))[rank]
        x = given[0][start:stop].requires_grad_()
        place = wave(mine, wire)
        with place:
            loss = loss_of(mine, (x, given[1][start:stop]))
        with place:
            torch.autograd.grad(loss, x, retain_graph=True)
            parts = torch.autograd.grad(loss, list(mine.parameters()))
        return list(parts), len(wire._rendezvous.launched[rank])

    (first, sums), (second, _) = together(work, 2)
    assert sums == 6
    reference = list(plain(model, [given]).values())
    for a, b, whole in zip(first, second, reference, strict=False):
        torch.testing.assert_close(a + b, whole, rtol=1e-10, atol=1e-11)


def test_a_shared_layer_that_is_recomputed_is_told() -> None:
    norm = nn.BatchNorm1d(4)
    model = nn.Sequential(norm, Recomputed(nn.Sequential(nn.Linear(4, 4), norm)))
    assert replace_batchnorm(model) == ["0"]
    place = wave(model, None)
    with place:
        loss = model(torch.randn(6, 4)).sum()
    with place, pytest.raises(ModelError, match="0 is recomputed, and ran 2 times"):
        loss.backward()


def test_outside_of_a_wave_and_in_evaluation_it_is_batchnorm() -> None:
    model, given = convolutional(), batch(5, 0)
    mine = copy.deepcopy(model)
    assert replace_batchnorm(mine) == ["1", "4", "7"]
    assert list(mine.state_dict()) == list(model.state_dict())
    assert plain(mine, [given]).keys() == plain(model, [given]).keys()
    for name, value in state(model).items():
        assert torch.equal(state(mine)[name], value)
    with wave(mine.eval(), None):
        assert torch.equal(mine(given[0]), model.eval()(given[0]))


def test_replacing_keeps_parameters_modes_and_shared_layers() -> None:
    norm = nn.BatchNorm1d(4).eval()
    model = nn.ModuleDict({"a": norm, "b": nn.Sequential(norm, nn.SyncBatchNorm(4))})
    assert replace_batchnorm(model) == ["a"]
    made = model["a"]
    assert isinstance(made, WaveBatchNorm) and made.weight is norm.weight and not made.training
    assert model["b"][0] is made and type(model["b"][1]) is nn.SyncBatchNorm
    made.running_mean.add_(1)  # type: ignore[union-attr]
    assert norm.running_mean is made.running_mean


def test_one_value_in_all_of_a_wave_is_told_on_every_device() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3))
    replace_batchnorm(model)

    def work(rank: int, wire: ThreadedWire) -> str:
        mine = copy.deepcopy(model)
        with pytest.raises(ModelError) as error, wave(mine, wire):
            mine(torch.ones(1 if rank == 0 else 0, 3))
        return error.value.what

    assert set(together(work, 2)) == {"0 has 1 value for each channel in this wave, which has no variance"}


@pytest.mark.parametrize("layers_done", [0, 2])
def test_a_device_that_gives_up_lets_the_others_go_on(layers_done: int) -> None:
    """It ran out of memory before, or amid, its forward: its part of all other sums is nothing."""
    model, first, second = convolutional(), batch(5, 0), batch(4, 1)

    def work(rank: int, wire: ThreadedWire) -> dict[str, torch.Tensor] | None:
        mine = copy.deepcopy(model)
        replace_batchnorm(mine)
        place = wave(mine, wire)
        if rank == 0:
            with place:
                loss = loss_of(mine, first)
            with place:
                loss.backward()
            return state(mine)
        with place:
            mine[:layers_done](second[0])
        place.pass_forward()
        place.pass_backward()
        return None

    found, _ = together(work, 2)
    if not layers_done:
        assert_is_reference([found], plain(convolutional(), [first]))


def test_each_layer_has_the_wire_of_those_who_hold_it() -> None:
    model = convolutional()
    replace_batchnorm(model)
    asked: list[str] = []

    def wire_of(name: str) -> None:
        asked.append(name)

    with wave(model, wire_of):
        model(batch(3, 0)[0])
    assert list(dict.fromkeys(asked)) == ["1", "4", "7"]
    assert all(layer.wave is None for layer in wave_layers(model))


def test_the_device_of_all_waves_hands_its_statistics_out() -> None:
    model = convolutional()

    def work(rank: int, wire: ThreadedWire) -> dict[str, torch.Tensor]:
        mine = copy.deepcopy(model)
        replace_batchnorm(mine)
        for _ in range(3 if rank == 1 else 1):
            mine(batch(4, rank)[0])
        before = {n: b.clone() for n, b in mine.named_buffers()}
        hand_out_statistics(wave_layers(mine), lambda name: wire, leads=rank == 1)
        return before if rank == 1 else dict(mine.named_buffers())

    found: list[Any] = together(work, 2)
    assert found[0].keys() == found[1].keys()
    for name in found[0]:
        assert torch.equal(found[0][name], found[1][name])
    assert found[0]["1.num_batches_tracked"] == 3


def test_statistics_can_be_kept_from_moving() -> None:
    model, given = convolutional(), batch(5, 0)
    before = {n: b.clone() for n, b in model.named_buffers()}
    with keeping_statistics(model):
        model(given[0])
    assert all(torch.equal(b, before[n]) for n, b in model.named_buffers())
    model(given[0])
    assert not torch.equal(model[1].running_mean, before["1.running_mean"])
