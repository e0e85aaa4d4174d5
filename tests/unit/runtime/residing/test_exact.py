"""Steps of a model whose parameters live on the host are those of a plain loop."""

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from evener.core.actions import parse_action
from evener.errors import ModelError
from evener.runtime.executor import Executor
from evener.runtime.holding import Alone, Settings, whole_model
from evener.runtime.problem import Problem, default_inputs
from evener.runtime.ranks import Ranks
from evener.runtime.residing.residing import Residing
from evener.runtime.wire import SoloWire
from tests.fakes import ScriptedDriver

CPU = torch.device("cpu")
SIZES = (3, 2)
WORDS, WIDTH = 11, 6


class Block(nn.Module):
    """A residual block with something of everything that keeps tensors for backward."""

    def __init__(self, *, is_frozen: bool) -> None:
        super().__init__()
        self.norm, self.batch = nn.LayerNorm(WIDTH), nn.BatchNorm1d(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.unused = nn.Parameter(torch.ones(3))
        self.up.weight.requires_grad_(not is_frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.batch(self.norm(x)))))


class Net(nn.Module):
    """Tied ends, a recurrent layer, a frozen weight, a parameter of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.shift = nn.Parameter(torch.zeros(WIDTH))
        self.blocks = nn.Sequential(*(Block(is_frozen=i == 1) for i in range(4)))
        self.memory = nn.LSTM(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.memory(self.blocks(self.embed(x) + self.shift))[0])


LAYERS = ("embed", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "memory", "head")


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, target, reduction="sum")


def net() -> Net:
    torch.manual_seed(3)
    return Net().double().train()


def batches(number: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    gen = torch.Generator().manual_seed(number)
    x, y = (torch.randint(WORDS, (sum(SIZES),), generator=gen) for _ in range(2))
    return list(zip(x.split(SIZES), y.split(SIZES), strict=True))


def optimizer(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=0.05)


Gradients = list[torch.Tensor]


def noting(moves: torch.optim.Optimizer) -> Gradients:
    """All gradients of the first step of `moves`, once it is taken."""
    found: Gradients = []

    def note(*_: object) -> None:
        if not found:
            ps = [p for group in moves.param_groups for p in group["params"]]
            found.extend(torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in ps)

    moves.register_step_pre_hook(note)
    return found


def plain(num_steps: int, max_norm: float | None) -> tuple[Net, Gradients]:
    """The same steps in a loop of torch's own."""
    model = net()
    moves = optimizer(list(model.parameters()))
    first = noting(moves)
    for step in range(num_steps):
        moves.zero_grad()
        for x, y in batches(step):
            (loss_of(model(x), y) / sum(SIZES)).backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        moves.step()
    return model, first


def hosted(
    num_steps: int,
    max_norm: float | None,
    *,
    stay: bool,
    recompute: bool = False,
    order: str = "0F0 0B0 0F1 0B1 0REDUCE_GRAD STEP",
    device: torch.device = CPU,
    model: Net | None = None,
) -> tuple[Net, Gradients, Executor]:
    """The steps with the parameters at home on the host."""
    model = model or net()
    layers = [model.get_submodule(name) for name in LAYERS]
    residing = Residing(model, layers, device, stay=stay, recompute=recompute)
    problem = Problem(loss=loss_of, inputs=default_inputs, reduction="sum")
    ranks, driver = Ranks(("lab/a",), "lab/a"), ScriptedDriver()
    holding = whole_model(
        model, problem, ranks, SoloWire(), device=device, residing=residing, on_host=driver.on_host
    )
    moves = optimizer(list(model.parameters()))
    first = noting(moves)
    ex = Executor(holding, moves, problem, ranks, driver, Settings(max_norm=max_norm))
    row = tuple(parse_action(word) for word in order.split())
    for step in range(num_steps):
        data = batches(step)
        ex.step(step, row, Alone(SIZES), lambda stage, micro, data=data: data[micro], sum(SIZES))
    return model, first, ex


def distance(ours: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> float:
    """‖ours - want‖ / ‖want‖ over all tensors together."""
    ours, want = ([t.detach().cpu().double() for t in ts] for ts in (ours, want))
    apart = sum(float((a - b).square().sum()) for a, b in zip(ours, want, strict=True))
    return (apart / sum(float(b.square().sum()) for b in want)) ** 0.5


def held(model: Net) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


ONE_BY_ONE = "0F0 0B0 0F1 0B1 0REDUCE_GRAD STEP"
ALL_FORWARD = "0F0 0F1 0B0 0B1 0REDUCE_GRAD STEP"
IN_TWO_PARTS = "0F0 0F1 0I0 0I1 0W0 0W1 0REDUCE_GRAD STEP"


@pytest.mark.parametrize("order", [ONE_BY_ONE, ALL_FORWARD, IN_TWO_PARTS])
@pytest.mark.parametrize(
    ("stay", "recompute", "max_norm"),
    [(True, False, None), (True, False, 0.5), (False, False, None), (False, False, 0.5), (False, True, 0.5)],
)
def test_a_step_is_that_of_a_plain_loop(stay: bool, recompute: bool, max_norm: float | None, order: str):
    model, first, ex = hosted(3, max_norm, stay=stay, recompute=recompute, order=order)
    want, want_first = plain(3, max_norm)
    assert distance(first, want_first) < 1e-12
    assert distance(held(model), held(want)) < 1e-10
    ex.close()
    assert "forward" not in vars(model.blocks[0])


def test_a_gradient_may_come_while_its_weight_is_away():
    """Nothing before the first layer wants a gradient, so its backward does not ask for its weight."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(4))).double()
    want = copy.deepcopy(model)
    residing = Residing(model, list(model), CPU, stay=False)
    problem = Problem(loss=nn.functional.mse_loss, inputs=default_inputs)
    ranks, driver = Ranks(("lab/a",), "lab/a"), ScriptedDriver()
    holding = whole_model(model, problem, ranks, SoloWire(), residing=residing, on_host=driver.on_host)
    moves = torch.optim.SGD(model.parameters(), lr=0.5)
    ex = Executor(holding, moves, problem, ranks, driver, Settings())
    data = [tuple(torch.randn(n, 5).double() for _ in range(2)) for n in SIZES]
    row = tuple(parse_action(word) for word in ALL_FORWARD.split())
    for step in range(2):
        ex.step(step, row, Alone(SIZES), lambda stage, micro: data[micro], sum(SIZES))
    plain_moves = torch.optim.SGD(want.parameters(), lr=0.5)
    for _ in range(2):
        plain_moves.zero_grad()
        x, y = (torch.cat(part) for part in zip(*data, strict=True))
        nn.functional.mse_loss(want(x), y).backward()
        plain_moves.step()
    assert distance(list(model.parameters()), list(want.parameters())) < 1e-12
    ex.close()


def test_a_parameter_that_is_used_outside_of_its_layer_is_an_error_and_no_lost_gradient():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(WORDS, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(self.embed(x), self.embed.weight)

    model = Tied().double()
    residing = Residing(model, [model.embed], CPU, stay=False)
    problem = Problem(loss=loss_of, inputs=default_inputs, reduction="sum")
    ranks, driver = Ranks(("lab/a",), "lab/a"), ScriptedDriver()
    holding = whole_model(model, problem, ranks, SoloWire(), residing=residing, on_host=driver.on_host)
    ex = Executor(holding, optimizer(list(model.parameters())), problem, ranks, driver, Settings())
    row = tuple(parse_action(word) for word in ONE_BY_ONE.split())
    with pytest.raises(ModelError, match="lives on the host and was used outside"):
        ex.step(0, row, Alone(SIZES), lambda stage, micro: batches(0)[micro], sum(SIZES))
    ex.close()


def test_the_model_keeps_the_users_own_parameters_and_names():
    before = net()
    names = dict(before.named_parameters())
    model, _, ex = hosted(1, None, stay=False)
    assert list(dict(model.named_parameters())) == list(names)
    assert all(p.device == CPU and p.grad is None for p in model.parameters())
    assert copy.deepcopy(model.state_dict()).keys() == before.state_dict().keys()
    ex.close()


def test_values_that_somebody_else_writes_come_to_the_device():
    model, _, ex = hosted(1, None, stay=True)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    data = batches(0)
    totals = ex.evaluate((parse_action("0F0"),), Alone(SIZES), lambda stage, micro: data[micro], SIZES[0])
    even = SIZES[0] * torch.tensor(float(WORDS)).log()
    assert totals.loss_sum == pytest.approx(float(even))
    ex.close()


def test_one_that_nobody_closed_is_in_nobodys_way():
    """A device was lost while stages were laid out: the next generation trained the guests of the first."""
    left = net()
    Residing(left, [left.get_submodule(name) for name in LAYERS], CPU, stay=False)
    ours, gradients, executor = hosted(2, None, stay=False, model=left)
    model, want = plain(2, None)
    assert distance(gradients, want) < 1e-12
    assert distance(list(ours.parameters()), list(model.parameters())) < 1e-12
    executor.close()
    assert "forward" not in left.blocks[0].__dict__


def test_a_forward_that_was_put_on_a_layer_is_run_and_put_back():
    model = net()
    layer, calls = model.blocks[0], []
    own = layer.forward

    def mine(x: torch.Tensor) -> torch.Tensor:
        calls.append(len(x))
        return own(x)

    layer.forward = mine
    _, _, executor = hosted(1, None, stay=True, model=model)
    assert calls == list(SIZES)
    executor.close()
    assert layer.forward is mine
