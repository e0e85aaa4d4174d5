"""Dropout by keys: masks that do not depend on the split, checked against a second way to compute them."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from evener.core.split import spans_of
from evener.errors import ModelError
from evener.runtime.cutting import cut
from evener.runtime.dropout import (
    KeyedDropout,
    dropout_keys,
    keyed_layers,
    lanes_of,
    replace_dropout,
    unkeyed_randomness,
)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(
        nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.4), nn.Linear(8, 6), nn.Dropout(0.2), nn.Linear(6, 3)
    ).double()
    assert replace_dropout(made, seed=3) == ["2", "4"]
    return made


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    return torch.randn(11, 5, generator=g, dtype=torch.float64), torch.randint(0, 3, (11,), generator=g)


def gradient(net: nn.Module, split: tuple[int, ...], order: list[int], step: int = 7) -> torch.Tensor:
    """The gradient of the summed loss, in micro-batches of these sizes of a batch in this order."""
    x, y = batch()
    net.zero_grad()
    for start, stop in spans_of(split):
        chosen = order[start:stop]
        keys = dropout_keys(net, step, chosen)
        with keys:
            loss = nn.functional.cross_entropy(net(x[chosen]), y[chosen], reduction="sum")
        with keys:
            loss.backward()
    return torch.cat([p.grad.flatten() for p in net.parameters()])


@pytest.mark.parametrize("split", [(4, 4, 3), (1,) * 11, (10, 1), (2, 9)])
def test_gradients_do_not_depend_on_the_split(split: tuple[int, ...]) -> None:
    net = model()
    whole = gradient(net, (11,), list(range(11)))
    parts = gradient(net, split, [3, 0, 10, 2, 7, 8, 9, 1, 4, 6, 5])
    assert (parts - whole).norm() <= 1e-12 * whole.norm()
    assert (gradient(net, (11,), list(range(11)), step=8) - whole).norm() > 0.1 * whole.norm()


def mask(
    layer: KeyedDropout, shape: tuple[int, ...], step: int = 0, start: int = 0, rows: int = 1
) -> torch.Tensor:
    samples = shape[0] // rows
    with dropout_keys([layer], step, range(start, start + samples)):
        return layer(torch.ones(shape)) != 0


def test_seed_step_layer_call_and_position_all_tell_masks_apart() -> None:
    first, other, seeded = (KeyedDropout(0.5, n, s) for n, s in (("a", 0), ("b", 0), ("a", 1)))
    found = [
        mask(layer, (1, 64), step, at) for layer in (first, other, seeded) for step in (0, 1) for at in (0, 1)
    ]
    with dropout_keys([first], 0, [0]):
        twice = [first(torch.ones(1, 64)) != 0 for _ in range(2)]
    assert torch.equal(twice[0], found[0])
    distinct = {tuple(m.flatten().tolist()) for m in [*found, twice[1]]}
    assert len(distinct) == 13


def plain_lanes(words: np.ndarray, size: int) -> np.ndarray:
    """The same mixing as in the docstring, one number at a time in Python's own integers."""
    low = 0xFFFFFFFF

    def lane(first: int, second: int, place: int) -> int:
        j = place // 2
        for bits, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            j = ((j ^ (j >> bits)) * factor) & low
        j ^= first
        for bits, factor in ((15, 0x21F0AAAD), (15, second | 1)):
            j = ((j ^ (j >> bits)) * factor) & low
        j ^= j >> 16
        half = j & 0xFFFF if place % 2 == 0 else j >> 16
        return half - 0x10000 if half >= 0x8000 else half

    keys = words.astype(np.int64) & low
    return np.array([[lane(int(a), int(b), place) for place in range(size)] for a, b in keys])


@pytest.mark.parametrize("size", [1, 2, 7, 64, 333])
def test_lanes_are_those_of_exact_integers(size: int) -> None:
    words = np.random.default_rng(0).integers(-(2**31), 2**31, (5, 2)).astype(np.int32)
    assert np.array_equal(lanes_of(torch.from_numpy(words), size).numpy(), plain_lanes(words, size))


def test_masks_are_the_same_on_every_machine_and_in_every_version() -> None:
    """Kept as numbers: a change here changes every run that was begun before."""
    kept = mask(KeyedDropout(0.5, "layer", 42), (2, 16), step=5, start=1000).int().tolist()
    assert ["".join(map(str, row)) for row in kept] == ["1001000000011010", "1100111100110011"]


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_entries_are_dropped_independently_at_the_rate_asked(p: float) -> None:
    layer = KeyedDropout(p, "a", 0)
    kept = mask(layer, (256, 1024)).double()
    entries = kept.numel()
    bound = 5 * (p * (1 - p) / entries) ** 0.5
    assert abs(float(kept.mean()) - (1 - p)) < bound
    centred = (kept - (1 - p)) / (p * (1 - p)) ** 0.5
    for near in (1, 2, 3, 31, 512):
        assert abs(float((centred[:, near:] * centred[:, :-near]).mean())) < 5 * (entries * 0.5) ** -0.5
    assert abs(float((centred[1:] * centred[:-1]).mean())) < 5 * entries**-0.5
    by_row, by_column = kept.mean(1), kept.mean(0)
    assert float(by_row.var() / (p * (1 - p) / 1024)) == pytest.approx(1, abs=0.5)
    assert float(by_column.var() / (p * (1 - p) / 256)) == pytest.approx(1, abs=0.3)


def test_what_is_kept_is_scaled_so_that_the_mean_stays() -> None:
    layer = KeyedDropout(1e-4, "a", 0)  # 6.55 of 65536 is rounded to 7
    with dropout_keys([layer], 0, range(4)):
        assert float(layer(torch.ones(4, 100, dtype=torch.float64)).max()) == 65536 / (65536 - 7)
    for p, value in ((0.0, 1.0), (1.0, 0.0)):
        layer.p = p
        with dropout_keys([layer], 0, range(4)):
            assert bool((layer(torch.ones(4, 3)) == value).all())


def test_samples_may_lie_in_several_rows_each() -> None:
    first = mask(KeyedDropout(0.5, "a", 0), (3, 4, 5))
    assert torch.equal(mask(KeyedDropout(0.5, "a", 0), (12, 5), rows=4), first.view(12, 5))
    assert torch.equal(mask(KeyedDropout(0.5, "a", 0), (3, 6, 5))[:, :4], first)  # padded behind


def test_whole_channels_are_dropped_where_they_were() -> None:
    net = nn.Sequential(nn.Dropout2d(0.5))
    replace_dropout(net, 0)
    kept = mask(net[0], (4, 16, 3, 3))
    assert torch.equal(kept, kept[:, :, :1, :1].expand_as(kept)) and 10 < int(kept[:, :, 0, 0].sum()) < 54


def test_rows_that_are_no_samples_are_told() -> None:
    layer = KeyedDropout(0.5, "block.drop", 0)
    with (
        dropout_keys([layer], 0, range(3)),
        pytest.raises(ModelError, match=r"block.drop has 4 rows for 3 samples"),
    ):
        layer(torch.ones(4, 5))


def test_without_keys_it_says_so_in_training_and_does_nothing_otherwise() -> None:
    net = model()
    with pytest.raises(ModelError, match="2 drops by keys and was given none"):
        net(batch()[0])
    net.eval()(batch()[0])


class Recomputed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


def test_what_is_recomputed_gets_the_same_masks() -> None:
    net = model()
    whole = gradient(net, (11,), list(range(11)))
    again = gradient(nn.Sequential(*map(Recomputed, net)), (4, 7), list(range(11)))
    assert (again - whole).norm() <= 1e-12 * whole.norm()


def test_a_shared_dropout_that_is_recomputed_is_told() -> None:
    drop = nn.Dropout(0.5)
    net = nn.Sequential(nn.Linear(5, 8), drop, Recomputed(nn.Sequential(nn.Linear(8, 3), drop))).double()
    assert replace_dropout(net, 0) == ["1"]
    assert len(keyed_layers(net)) == 1
    with pytest.raises(ModelError, match="1 is recomputed, and ran 2 times"):
        gradient(net, (11,), list(range(11)))


def test_only_what_can_be_replaced_is() -> None:
    class Own(nn.Dropout):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    net = nn.Sequential(Own(0.5), nn.AlphaDropout(0.5), nn.Sequential(nn.Dropout(0.5).eval()))
    assert replace_dropout(net, 0) == ["2.0"]
    assert type(net[0]) is Own and not net[2][0].training
    assert copy.deepcopy(net)[2][0].name == "2.0"


def test_what_no_key_reaches_is_named() -> None:
    net = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    replace_dropout(net, 0)
    (found,) = unkeyed_randomness(net, lambda: net(torch.ones(2, 3, 8)))
    assert found.startswith("dropout: self_attn draws aten.") and found.endswith(", which no key reaches")
    net.self_attn.dropout = 0.0
    assert unkeyed_randomness(net, lambda: net(torch.ones(2, 3, 8))) == []


def test_a_dropout_with_several_calls_is_named() -> None:
    drop = nn.Dropout(0.5)
    net = nn.Sequential(drop, nn.Tanh(), drop)
    replace_dropout(net, 0)
    (found,) = unkeyed_randomness(net, lambda: net(torch.ones(2, 3)))
    assert found.startswith("dropout: 0 is called 2 times in one forward")


def test_stages_of_a_cut_model_drop_what_the_model_does() -> None:
    net, (x, _) = model(), batch()
    with dropout_keys(net, 0, None):
        made = cut(net, [["0", "1", "2"], ["3", "4", "5"]], example=((x[:3],), {}))
    with dropout_keys(net, 2, range(11)):
        whole = net(x)
    carry = made.flatten((x,), {})
    for stage in made.stages:
        with dropout_keys(stage, 2, range(11)):
            carry = stage(carry)
    torch.testing.assert_close(made.unflatten_output(carry), whole, rtol=1e-12, atol=0)
