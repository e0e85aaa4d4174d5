"""Optimisers whose state lies in a file: the same steps to the bit, little memory, nothing left behind."""

import copy
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from torch import nn

from evener.errors import EnvironmentBrokenError, UsageError
from evener.runtime.residing.ondisk import StateOnDisk

Make = Callable[[Iterable], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01),
    "amsgrad": lambda ps: torch.optim.Adam(ps, lr=0.01, amsgrad=True),
    "foreach": lambda ps: torch.optim.AdamW(ps, lr=0.01, foreach=True),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "plain sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.1),
    "adafactor": lambda ps: torch.optim.Adafactor(ps, lr=0.1),
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(130, 150), nn.Tanh(), nn.Linear(150, 40), nn.Linear(40, 3))


def run(net: nn.Module, moves: torch.optim.Optimizer, step: Callable[[], object], first: int = 0) -> None:
    for number in range(first, first + 3):
        moves.zero_grad()
        net(torch.randn(8, 130, generator=torch.Generator().manual_seed(number))).square().mean().backward()
        step()


def on_disk(net: nn.Module, moves: torch.optim.Optimizer, folder: Path, **kw) -> StateOnDisk:
    state = StateOnDisk(list(net.parameters()), folder, **kw)
    state.open(moves)
    return state


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("least", [0, 8000, 2**30])
def test_steps_are_the_same_to_the_bit(make: Make, least: int, tmp_path: Path):
    ours, wanted = model(), model()
    with_decay = lambda net: [{"params": net[0].parameters()}, {"params": net[2:].parameters(), "lr": 0.003}]  # noqa: E731
    moves, plain = make(with_decay(ours)), make(with_decay(wanted))
    state = on_disk(ours, moves, tmp_path, least_bytes=least)
    for first in (0, 3):
        run(ours, moves, lambda: state.step(moves), first)
        run(wanted, plain, plain.step, first)
    for a, b in zip(ours.parameters(), wanted.parameters(), strict=True):
        assert torch.equal(a, b)
        assert moves.state[a].keys() == plain.state[b].keys()
        for key, value in plain.state[b].items():
            assert torch.equal(torch.as_tensor(moves.state[a][key]), torch.as_tensor(value)), key
    assert moves.state_dict()["param_groups"] == plain.state_dict()["param_groups"]


def test_the_file_has_the_state_and_no_name(tmp_path: Path):
    net, told = model(), []
    moves = OPTIMIZERS["adamw"](net.parameters())
    state = on_disk(net, moves, tmp_path, least_bytes=8000, on_disk=lambda r, w: told.append((r, w)))
    run(net, moves, lambda: state.step(moves))
    assert state.num_bytes == 2 * (81920 + 24576)  # 130 x 150 and 150 x 40 floats in whole pages of 4096
    assert told == [
        (0, state.num_bytes),
        (state.num_bytes, state.num_bytes),
        (state.num_bytes, state.num_bytes),
    ]
    assert list(tmp_path.iterdir()) == []
    in_file = state.later(
        {f"{n}/{k}": v for n, p in net.named_parameters() for k, v in moves.state[p].items()}
    )
    assert set(in_file) == {f"{n}.weight/{key}" for n in (0, 2) for key in ("exp_avg", "exp_avg_sq")}
    assert torch.equal(in_file["0.weight/exp_avg"].read(), moves.state[net[0].weight]["exp_avg"])


def test_what_waits_for_a_step_hears_of_one(tmp_path: Path):
    net, heard = model(), []
    moves = OPTIMIZERS["sgd"](net.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(moves, 1, 0.5)
    moves.register_step_pre_hook(lambda *_: heard.append("before"))
    moves.register_step_post_hook(lambda *_: heard.append(float(net[0].weight.detach().sum())))
    state = on_disk(net, moves, tmp_path, least_bytes=0)
    run(net, moves, lambda: (state.step(moves), scheduler.step()))
    assert heard[::2] == ["before"] * 3
    assert heard[-1] == float(net[0].weight.detach().sum())


def test_what_is_restored_goes_to_the_file_again(tmp_path: Path):
    net, other = model(), model()
    moves, plain = (OPTIMIZERS["adamw"](x.parameters()) for x in (net, other))
    state = on_disk(net, moves, tmp_path, least_bytes=8000)
    run(net, moves, lambda: state.step(moves))
    run(other, plain, plain.step)
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        moves.state[p] = copy.deepcopy(plain.state[q])
        state.adopt(moves, p)
    kept = {str(n): moves.state[p]["exp_avg"] for n, p in enumerate(net.parameters())}
    assert set(state.later(kept)) == {"0", "2"}
    run(net, moves, lambda: state.step(moves), 3)
    run(other, plain, plain.step, 3)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters(), strict=True))


def test_state_that_came_from_elsewhere_is_stepped_on(tmp_path: Path):
    """As after a change of devices: the new file was empty, and averages went on from 0 without a word."""
    net, other = model(), model()
    moves, plain = (OPTIMIZERS["adamw"](x.parameters()) for x in (net, other))
    before = on_disk(net, moves, tmp_path, least_bytes=8000)
    run(net, moves, lambda: before.step(moves))
    run(other, plain, plain.step)
    again = OPTIMIZERS["adamw"](net.parameters())
    state = on_disk(net, again, tmp_path, least_bytes=8000)
    for p in net.parameters():
        again.state[p] = moves.state[p]
    run(net, again, lambda: state.step(again), 3)
    run(other, plain, plain.step, 3)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters(), strict=True))
    kept = {str(n): again.state[p]["exp_avg"] for n, p in enumerate(net.parameters())}
    assert set(state.later(kept)) == {"0", "2"}


class Counting(torch.optim.SGD):
    """Moves by a number that its group counts up: called twice, it goes elsewhere."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] *= 0.5
        return super().step(closure)


def test_an_optimiser_that_is_not_the_same_leaf_by_leaf_is_refused(tmp_path: Path):
    net = model()
    with pytest.raises(UsageError, match="does not move each parameter by itself"):
        on_disk(net, Counting(net.parameters(), lr=0.1, momentum=0.9), tmp_path, least_bytes=0)


def test_a_disk_without_room_is_an_error_before_the_first_step(tmp_path: Path, monkeypatch):
    net = model()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(2000, 1000, 1000))
    with pytest.raises(EnvironmentBrokenError, match="1000 free") as e:
        on_disk(net, OPTIMIZERS["adamw"](net.parameters()), tmp_path, least_bytes=8000)
    assert "212992 bytes needed" in e.value.numbers


SCRIPT = """
import os, sys, torch
from pathlib import Path
from torch import nn
from evener.runtime.residing.ondisk import StateOnDisk
def high(): return int(next(x for x in open("/proc/self/status") if x.startswith("VmHWM")).split()[1]) * 1024
ps = [nn.Parameter(torch.ones(2**20)) for _ in range(24)]
for p in ps: p.grad = torch.ones_like(p)
moves = torch.optim.AdamW(ps)
state = StateOnDisk(ps, Path(sys.argv[1]))
state.open(moves)
before = high()
for _ in range(2): state.step(moves)
print(state.num_bytes, high() - before)
os.kill(os.getpid(), 9)
"""


def test_memory_holds_a_few_parameters_of_it_and_a_kill_leaves_nothing(tmp_path: Path):
    """24 parameters of 4 MB have 201 MB of state; what malloc would keep for later is not counted."""
    ended = subprocess.run(
        [sys.executable, "-u", "-c", SCRIPT, str(tmp_path), "kill"],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},
    )
    assert ended.returncode == -9, ended.stderr
    num_bytes, more = map(int, ended.stdout.split())
    assert num_bytes == 24 * 2 * 2**22
    assert more < 0.15 * num_bytes
    assert list(tmp_path.iterdir()) == []
