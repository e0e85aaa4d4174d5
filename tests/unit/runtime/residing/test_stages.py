"""Two stages of a cut model on one device, each with its own residence: the step of a plain loop."""

import copy

import pytest
import torch
from torch import nn

from evener.core.actions import parse_action
from evener.core.plan import Pipeline, Plan, Share, Stage
from evener.core.routes import Routes
from evener.runtime.cutting import cut
from evener.runtime.executor import Executor
from evener.runtime.holding import Holding, Settings
from evener.runtime.parts import Part
from evener.runtime.problem import Problem, default_inputs
from evener.runtime.ranks import Ranks
from evener.runtime.reducers import reducers_for
from evener.runtime.residing.homes import Homes
from evener.runtime.residing.residing import Residing
from evener.runtime.segments import segments_of
from evener.runtime.wire import SoloWire
from tests.fakes import ScriptedDriver
from tests.unit.runtime.residing.test_exact import distance

HERE = "lab/a"
CPU = torch.device("cpu")
SPANS = (("0", "1", "2"), ("3", "4"))
ROW = "0F0 1F0 0F1 1B0 1F1 0B0 1B1 0B1 1REDUCE_GRAD 0REDUCE_GRAD STEP"


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def data(step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    gen = torch.Generator().manual_seed(step)
    x, y = (torch.randn(4, n, generator=gen).double() for n in (5, 3))
    return list(zip(x.split(2), y.split(2), strict=True))


def plan(*residences: str | None) -> Plan:
    share = Share(devices=(HERE,), samples=2)
    stages = tuple(
        Stage(layers=layers, shares=(share,), residence=r)
        for layers, r in zip(SPANS, residences, strict=True)
    )
    pipeline = Pipeline(samples=4, micro_batch=2, stages=stages)
    return Plan(global_batch=4, pipelines=(pipeline,), schedule="1f1b")


def executor_of(model: nn.Module, plan: Plan, device: torch.device = CPU) -> Executor:
    problem = Problem(loss=nn.functional.mse_loss, inputs=default_inputs)
    made = cut(model, list(SPANS), example=((torch.randn(3, 5).double(),), {}))
    parts = {}
    for number, (module, stage) in enumerate(zip(made.stages, plan.pipelines[0].stages, strict=True)):
        residing = None
        if stage.residence:
            layers = [module.held.get_submodule(name) for name in stage.layers]
            residing = Residing(module, layers, device, stay=stage.residence == "host-optimizer")
        else:
            module.to(device)
        parts[number] = Part(
            stage=number,
            module=module,
            problem=problem,
            device=device,
            is_first=number == 0,
            is_last=number == 1,
            ends=made,
            residing=residing,
        )
    ranks, driver = Ranks((HERE,), HERE), ScriptedDriver()
    homes = Homes([p.residing for p in parts.values() if p.residing], driver.on_host)
    named = dict(model.named_parameters())
    names = {n: [x for x in p.names if x in named] for n, p in parts.items()}
    devices = dict.fromkeys(parts, (HERE,))
    segments = segments_of(names, devices, {n: n for n in named}, list(named))
    reducers = reducers_for(segments, HERE, frozenset(parts), named, lambda among: SoloWire(), 1, homes)
    holding = Holding(parts=parts, reducers=reducers, wire=SoloWire(), homes=homes)
    moves = torch.optim.AdamW(model.parameters(), lr=0.05)
    return Executor(holding, moves, problem, ranks, driver, Settings(max_norm=0.5))


@pytest.mark.parametrize(
    "residences",
    [("host", "host-optimizer"), ("host-optimizer", "host"), (None, "host"), ("host", None)],
)
def test_stages_of_all_residences_take_one_step(residences: tuple[str | None, str | None]):
    model = net()
    want = copy.deepcopy(model)
    ex = executor_of(model, plan(*residences))
    row = tuple(parse_action(word) for word in ROW.split())
    for step in range(3):
        ex.step(step, row, Routes(plan(*residences)), lambda stage, micro, step=step: data(step)[micro], 4)
    moves = torch.optim.AdamW(want.parameters(), lr=0.05)
    for step in range(3):
        moves.zero_grad()
        x, y = (torch.cat(part) for part in zip(*data(step), strict=True))
        nn.functional.mse_loss(want(x), y).backward()
        nn.utils.clip_grad_norm_(want.parameters(), 0.5)
        moves.step()
    assert distance(list(model.parameters()), list(want.parameters())) < 1e-10
    ex.close()
