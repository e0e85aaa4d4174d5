"""State as flat named tensors: the same bits back, in place, for every optimiser; wrong names are listed."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim

from evener.errors import ModelError, StateError
from evener.runtime.state import export_state, import_state, owners

MAKE: dict[str, Callable[[Any], optim.Optimizer]] = {
    "sgd": lambda p: optim.SGD(p, lr=0.1),
    "momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: optim.AdamW(p, lr=0.01),
    "adamw fused": lambda p: optim.AdamW(p, lr=0.01, fused=True),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.1),
    "rmsprop": lambda p: optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "nadam": lambda p: optim.NAdam(p, lr=0.01),
    "adafactor": lambda p: optim.Adafactor(p, lr=0.01),
    "counted": lambda p: Counted(p),
}


class Counted(optim.Optimizer):
    """Keeps plain Python numbers, as optimisers outside of torch do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                state = self.state[p]
                state["num"] = state.get("num", 0) + 1
                state["size"] = float(p.norm())
                state["warm"] = state["num"] < 2
                state["nothing"] = None
                p.sub_(p.grad, alpha=self.param_groups[0]["lr"] / state["num"] + state["warm"] * 1e-3)


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)).double()


def tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return dict(module.named_parameters()) | dict(module.named_buffers())


def train(module: nn.Module, optimizer: optim.Optimizer, steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        module(torch.randn(6, 4, generator=generator, dtype=torch.float64)).square().sum().backward()
        optimizer.step()


def taken(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: t.clone() for name, t in state.items()}


@pytest.mark.parametrize("kind", MAKE)
def test_what_goes_on_from_an_imported_state_goes_on_bit_for_bit(kind: str) -> None:
    """Into a model that has never taken a step, and into one that has taken others."""
    first = model()
    optimizer = MAKE[kind](first.parameters())
    train(first, optimizer, 3, seed=1)
    state = taken(export_state(tensors(first), optimizer))
    train(first, optimizer, 2, seed=2)
    for steps in (0, 4):
        second = model(seed=9)
        other = MAKE[kind](second.parameters())
        train(second, other, steps, seed=3)
        import_state(state, tensors(second), other)
        again = export_state(tensors(second), other)
        assert list(again) == list(state) and all(torch.equal(again[n], state[n]) for n in state)
        train(second, other, 2, seed=2)
        assert all(map(torch.equal, tensors(first).values(), tensors(second).values()))


def test_names_are_those_of_the_user() -> None:
    linear = nn.Linear(2, 1, bias=False)
    optimizer = MAKE["counted"](linear.parameters())
    linear(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = export_state(dict(linear.named_parameters()), optimizer)
    kept = [f"optimizer/weight/{key}" for key in ("num:int", "size:float", "warm:bool")]
    assert list(state) == ["model/weight", *kept]
    import_state(state, dict(linear.named_parameters()), optimizer)
    assert [type(v) for v in optimizer.state[linear.weight].values()][:3] == [int, float, bool]


def test_export_refers_and_import_fills_in_place() -> None:
    """Gradient buckets and cut stages hold the same tensors: they must stay what they are."""
    module = model()
    optimizer = MAKE["momentum"](module.parameters())
    train(module, optimizer, 1, seed=1)
    state = export_state(tensors(module), optimizer)
    assert state["model/0.weight"].data_ptr() == module[0].weight.data_ptr()
    weight, momentum = module[0].weight, optimizer.state[module[0].weight]["momentum_buffer"]
    import_state({n: t + 1 for n, t in state.items()}, tensors(module), optimizer)
    assert module[0].weight is weight and weight.requires_grad
    assert optimizer.state[weight]["momentum_buffer"] is momentum


def test_a_part_by_names_and_back() -> None:
    module = model()
    optimizer = MAKE["adam"](module.parameters())
    train(module, optimizer, 1, seed=1)
    part = export_state(tensors(module), optimizer, ["2.weight"])
    assert {n.split("/")[1] for n in part} == {"2.weight"} and len(part) == 5
    import_state(part, {"2.weight": module[2].weight}, optimizer)


def test_tied_parameters_come_once_and_frozen_ones_without_optimiser_state() -> None:
    module = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    module[1].weight = module[0].weight
    module.frozen = nn.Parameter(torch.ones(1), requires_grad=False)
    optimizer = MAKE["momentum"]([module[0].weight])
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    named = dict(module.named_parameters(remove_duplicate=False))
    state = export_state(named, optimizer)
    assert sorted(state) == ["model/0.weight", "model/frozen", "optimizer/0.weight/momentum_buffer"]
    import_state(taken(state), named, optimizer)


def test_a_state_from_before_the_first_step_takes_optimiser_state_away() -> None:
    module = model()
    optimizer = MAKE["momentum"](module.parameters())
    state = taken(export_state(tensors(module), optimizer))
    train(module, optimizer, 2, seed=1)
    import_state(state, tensors(module), optimizer)
    assert not optimizer.state


def test_what_is_missing_or_too_much_is_listed_and_nothing_changes() -> None:
    module = model()
    optimizer = MAKE["adamw"](module.parameters())
    train(module, optimizer, 1, seed=1)
    good = taken(export_state(tensors(module), optimizer))
    bad = copy.copy(good)
    del bad["model/0.weight"], bad["optimizer/2.bias/exp_avg"]
    bad |= {
        "model/3.weight": torch.zeros(2),
        "optimizer/1.running_mean/exp_avg": torch.zeros(5),
        "optimizer/0.bias/other": torch.zeros(5),
        "elsewhere": torch.zeros(1),
        "model/2.weight": torch.zeros(9),
        "model/2.bias": torch.zeros(2),
    }
    with pytest.raises(StateError) as e:
        import_state(bad, tensors(module), optimizer)
    assert "2 missing: model/0.weight, optimizer/2.bias/exp_avg" in e.value.numbers
    assert "4 too much" in e.value.numbers and "elsewhere" in e.value.numbers
    assert "2 of another shape or dtype" in e.value.numbers
    assert "model/2.bias (2,) torch.float32 for (2,) torch.float64" in e.value.numbers
    now = export_state(tensors(module), optimizer)
    assert all(torch.equal(now[n], good[n]) for n in good)


@pytest.mark.parametrize(
    ("option", "place"), [({}, "cpu"), ({"capturable": True}, "meta"), ({"fused": True}, "meta")]
)
def test_step_counts_lie_where_the_optimiser_reads_them(option: dict[str, bool], place: str) -> None:
    """On the host, except where the device itself counts; the meta device stands for an accelerator."""
    p = nn.Parameter(torch.empty(2, device="meta"))
    optimizer = optim.AdamW([{"params": [p], **option}], lr=0.1)
    keys = {"step": torch.tensor(3.0), "exp_avg": torch.zeros(2), "exp_avg_sq": torch.zeros(2)}
    import_state(
        {"model/p": torch.zeros(2)} | {f"optimizer/p/{k}": t for k, t in keys.items()}, {"p": p}, optimizer
    )
    state = optimizer.state[p]
    assert state["step"].device.type == place
    assert state["exp_avg"].device.type == "meta"


def test_optimiser_state_that_no_file_can_hold_is_refused() -> None:
    module = nn.Linear(1, 1)
    optimizer = MAKE["sgd"](module.parameters())
    for bad in ({"history": [1, 2]}, {"a/b": torch.zeros(1)}, {"a:int": 3}):
        optimizer.state[module.weight] = bad
        with pytest.raises(ModelError, match="of weight, which cannot be saved"):
            export_state(dict(module.named_parameters()), optimizer)


def test_owners_balance_bytes_among_the_holders_that_are_there() -> None:
    holders = {"a": ("x", "y"), "b": ("x", "y"), "c": ("y", "x"), "d": ("z",), "e": ("z", "y")}
    sizes = {"a": 10, "b": 6, "c": 5, "d": 9, "e": 1}
    got = owners(holders, ["x", "y", "z"], sizes)
    assert got == {"a": "x", "d": "z", "b": "y", "c": "y", "e": "z"}
    assert owners(dict(reversed(holders.items())), ["x", "y", "z"], sizes) == got
    without = owners(holders, ["x", "y"], sizes)
    assert "d" not in without and without["e"] == "y"
