"""The executor sets keys and waves for each micro-batch: a step is that of a plain loop over merged ones."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from evener.core.actions import parse_action
from evener.errors import ModelError
from evener.runtime.batchnorm import replace_batchnorm, wave, wave_layers
from evener.runtime.dropout import dropout_keys, keyed_layers, replace_dropout
from evener.runtime.executor import Executor
from evener.runtime.holding import Alone, Settings, whole_model
from evener.runtime.problem import Problem, default_inputs
from evener.runtime.ranks import Ranks
from evener.runtime.scope import Scope
from tests.fakes import Rendezvous, ScriptedDriver, ThreadedWire, together

SIZES = ((3, 2, 2), (2, 4))
"""Micro-batches of each device; the last one of the first device is a wave of its own."""
NAMES = ("lab/a", "lab/b")


class OutOfRoom(nn.Module):
    """Runs out of memory in one of its calls."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.calls = at, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == self.at:
            raise torch.OutOfMemoryError("full")
        return x


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(5, 6),
        nn.BatchNorm1d(6),
        OutOfRoom(0),
        nn.Dropout(0.3),
        nn.Linear(6, 4),
        nn.BatchNorm1d(4),
        nn.Linear(4, 2),
    ).double()


def data() -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    return torch.randn(13, 5, generator=g, dtype=torch.float64), torch.randint(0, 2, (13,), generator=g)


def positions(device: int, m: int) -> range:
    start = 7 * device + sum(SIZES[device][:m])
    return range(start, start + SIZES[device][m])


def steps(net: nn.Module, order: str, *, recompute: bool, full_at: int = 0) -> list:
    """One step on two devices: (state, verdict) of each."""
    waves = Rendezvous(2)

    def work(rank: int, wire: ThreadedWire) -> tuple[dict[str, torch.Tensor], str]:
        mine, (x, y) = copy.deepcopy(net), data()
        replace_dropout(mine, 5)
        replace_batchnorm(mine)
        next(m for m in mine.modules() if isinstance(m, OutOfRoom)).at = full_at if rank else 0
        problem = Problem(loss=nn.functional.cross_entropy, inputs=default_inputs)
        ranks = Ranks(NAMES, NAMES[rank])
        holding = whole_model(mine, problem, ranks, wire, recompute=recompute)
        optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
        executor = Executor(holding, optimizer, problem, ranks, ScriptedDriver(), Settings())
        sizes = SIZES[rank]
        kinds = (
            [(k, m) for k in "FB" for m in range(len(sizes))]
            if order == "gpipe"
            else [(k, m) for m in range(len(sizes)) for k in "FB"]
        )
        row = tuple(parse_action(w) for w in [*(f"0{k}{m}" for k, m in kinds), "0REDUCE_GRAD", "STEP"])
        norms, drops = wave_layers(mine), keyed_layers(mine)

        def fetch(stage: int, m: int) -> tuple[torch.Tensor, torch.Tensor]:
            return x[positions(rank, m)], y[positions(rank, m)]

        def scope_of(stage: int, m: int) -> Scope:
            both = all(m < len(sizes) for sizes in SIZES)
            place = wave(norms, waves.wire(rank) if both else None)
            return Scope(keys=dropout_keys(drops, 0, positions(rank, m)), wave=place)

        result = executor.step(0, row, Alone(sizes), fetch, 13, scope_of)
        return dict(mine.state_dict()), result.verdict.do

    return together(work, 2)


def reference(net: nn.Module) -> dict[str, torch.Tensor]:
    x, y = data()
    replace_dropout(net, 5)
    for m in range(3):
        merged = [p for d in range(2) if m < len(SIZES[d]) for p in positions(d, m)]
        with dropout_keys(net, 0, merged):
            (nn.functional.cross_entropy(net(x[merged]), y[merged], reduction="sum") / 13).backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    return net.state_dict()


@pytest.mark.parametrize("order", ["gpipe", "one by one"])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_step_with_masks_and_waves_is_that_of_the_merged_micro_batches(order: str, recompute: bool) -> None:
    want = reference(model())
    found = steps(model(), order, recompute=recompute)
    for state, verdict in found:
        assert verdict == "apply"
        for name in want:
            if state is found[0][0] or ("running" not in name and "tracked" not in name):
                torch.testing.assert_close(state[name], want[name], rtol=1e-12, atol=1e-13)


def full_before_raw_input() -> nn.Sequential:
    """BatchNorm on samples as they are, which has no sum in backward: who never got there must know."""
    torch.manual_seed(0)
    return nn.Sequential(OutOfRoom(0), nn.BatchNorm1d(5), nn.Linear(5, 4), nn.BatchNorm1d(4)).double()


@pytest.mark.parametrize("made", [model, full_before_raw_input])
@pytest.mark.parametrize("full_at", [1, 2])
def test_a_device_that_runs_out_of_memory_leaves_nobody_waiting(
    made: Callable[[], nn.Sequential], full_at: int
) -> None:
    found = steps(made(), "one by one", recompute=False, full_at=full_at)
    assert [verdict for _, verdict in found] == ["shrink", "shrink"]


def test_a_single_sample_left_by_one_without_memory_is_no_error_of_the_model() -> None:
    waves = Rendezvous(2)
    net = nn.Sequential(nn.BatchNorm1d(3)).double()
    replace_batchnorm(net)

    def work(rank: int, wire: ThreadedWire) -> bool:
        mine = copy.deepcopy(net)
        place = wave(mine, waves.wire(rank))
        if rank:
            place.pass_forward()
            return True
        with place:
            return bool(mine(torch.ones(1, 3, dtype=torch.float64)).isfinite().all())

    assert together(work, 2) == [True, True]
    with pytest.raises(ModelError, match="has no variance"), wave(net, None):
        net(torch.ones(1, 3, dtype=torch.float64))
