"""Two parts of a backward are the whole: on graphs with every way in which inputs and parameters can meet."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.shape_models import FAMILIES
from evener.runtime.split import SplitBackward

Net = tuple[list[nn.Parameter], list[Tensor], Callable[[], list[Tensor]]]


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def leaf(*shape: int) -> Tensor:
    return randn(*shape).requires_grad_()


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(randn(*shape))


def chain() -> Net:
    layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 2)).double()
    x = leaf(5, 3)
    return list(layers.parameters()), [x], lambda: [layers(x)]


def tied_along_the_way() -> Net:
    """One weight three times: its first use lies behind the others."""
    w, x = weight(3, 3), leaf(5, 3)
    return [w], [x], lambda: [((x @ w).tanh() @ w).tanh() @ w.t()]


def residual() -> Net:
    a, b, x = weight(3, 3), weight(3, 3), leaf(5, 3)

    def run() -> list[Tensor]:
        h = x + (x @ a).tanh()
        return [h + (h @ b).tanh() @ a]

    return [a, b], [x], run


def from_parameters_alone() -> Net:
    """An output that meets no input, of a weight that also does."""
    w, v, x = weight(3, 3), weight(3), leaf(5, 3)
    return [w, v], [x], lambda: [x @ w * v, w.square().sum(0) + v, v.exp()]


def passing_through() -> Net:
    """The second output is an input itself, the third a view of it."""
    w, x, z = weight(3, 3), leaf(5, 3), leaf(2, 2)
    return [w], [x, z], lambda: [x @ w, z, x.t()]


def unused() -> Net:
    w, idle, x, z = weight(3, 3), weight(2), leaf(5, 3), leaf(4)
    return [w, idle], [x, z], lambda: [x @ w]


def no_input() -> Net:
    """A first stage: nothing that came in needs a gradient."""
    embed, line = nn.Embedding(7, 3).double(), nn.Linear(3, 2).double()
    ids = torch.tensor([[1, 2], [2, 6]])
    return [*embed.parameters(), *line.parameters()], [], lambda: [line(embed(ids))]


def several_outputs_of_one_node() -> Net:
    w, v, x = weight(4, 6), weight(2), leaf(5, 4)

    def run() -> list[Tensor]:
        a, b, c = (x @ w).chunk(3, -1)
        return [a * b * v, c]

    return [w, v], [x], run


def recurrent() -> Net:
    lstm = nn.LSTM(3, 4, num_layers=2, batch_first=True).double()
    x = leaf(2, 5, 3)
    return list(lstm.parameters()), [x], lambda: [lstm(x)[0]]


def attention() -> Net:
    block, x = FAMILIES["text"].build().double().blocks[0], leaf(2, 6, 6)
    mask = torch.ones(6, 6, dtype=torch.bool).triu(1)
    return list(block.parameters()), [x], lambda: [block(x, mask)]


def images() -> Net:
    net = FAMILIES["residual"].build().double()
    x = leaf(2, 2, 8, 8)
    return list(net.parameters()), [x], lambda: [net(x)]


def in_place() -> Net:
    w, x = weight(3, 3), leaf(5, 3)
    return [w], [x], lambda: [(x @ w).mul_(2).relu_() @ w]


def frozen() -> Net:
    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)).double()
    layers[1].requires_grad_(False)
    x = leaf(5, 3)
    return [p for p in layers.parameters() if p.requires_grad], [x], lambda: [layers(x)]


NETS = [
    *(chain, tied_along_the_way, residual, from_parameters_alone, passing_through, unused, no_input),
    *(several_outputs_of_one_node, recurrent, attention, images, in_place, frozen),
]


@pytest.mark.parametrize("at_once", [False, True], ids=["split", "at_once"])
@pytest.mark.parametrize("make", NETS, ids=lambda net: net.__name__)
def test_two_parts_are_the_whole(make: Callable[[], Net], at_once: bool) -> None:
    torch.manual_seed(0)
    parameters, inputs, run = make()
    outputs = run()
    seeds = [torch.randn_like(t) for t in outputs]
    want = torch.autograd.grad(outputs, [*inputs, *parameters], seeds, allow_unused=True)
    split = SplitBackward(run(), inputs, parameters, at_once=at_once)
    got_inputs = split.of_inputs(seeds)
    got = dict(split.of_parameters())
    found = [*got_inputs, *(got.get(p) for p in parameters)]
    for a, b in zip(found, want, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.allclose(a, b, rtol=1e-13, atol=1e-13)
    assert all(p.grad is None for p in [*parameters, *inputs])


def test_the_worked_number() -> None:
    w, x = nn.Parameter(torch.tensor(2.0)), torch.tensor(5.0, requires_grad=True)
    split = SplitBackward([3 * w * x], [x], [w])
    assert split.of_inputs([torch.tensor(1.0)]) == [6.0]
    assert split.of_parameters() == [(w, 15.0)]


def test_the_second_part_walks_no_way_to_an_input_again() -> None:
    """Each activation's node runs once in each part, however many layers stand before and behind it."""
    walked: list[int] = []
    x = leaf(2, 3)
    layers = nn.ModuleList(nn.Linear(3, 3).double() for _ in range(4))
    h = x
    for i, layer in enumerate(layers):
        h = layer(h)
        h.register_hook(lambda gradient, i=i: walked.append(i))
    split = SplitBackward([h], [x], list(layers.parameters()))
    split.of_inputs([torch.ones_like(h)])
    assert walked == [3, 2, 1, 0]
    walked.clear()
    assert len(split.of_parameters()) == 8
    assert sorted(walked) == [0, 1, 2, 3]


def test_what_is_recomputed_is_recomputed_once() -> None:
    ran: list[int] = []
    layers = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    layers.register_forward_hook(lambda *_: ran.append(1))
    x = leaf(2, 3)
    out = checkpoint(layers, x, use_reentrant=False)
    split = SplitBackward([out], [x], list(layers.parameters()), at_once=True)
    split.of_inputs([torch.ones_like(out)])
    assert len(split.of_parameters()) == 4
    assert len(ran) <= 2


def test_the_graph_is_let_go_of_after_the_second_part() -> None:
    w, x = weight(3, 3), leaf(5, 3)
    out = x @ w
    split = SplitBackward([out], [x], [w])
    split.of_inputs([torch.ones_like(out)])
    split.of_parameters()
    assert split.of_parameters() == []
