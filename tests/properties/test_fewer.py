"""Over random groups, parts and weights: outer steps and late gradients are what their formulas say."""

from concurrent.futures import ThreadPoolExecutor

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from evener.core.exchange import Exchange, Lane, exchange_of
from evener.core.plan import Reduction
from evener.runtime.outer.between import Between
from evener.runtime.outer.late import Late
from evener.runtime.outer.local import Group, LocalSteps
from tests.mailboxes import Post, wires

SHAPES = ((3, 2), (5,))


@st.composite
def exchanges(draw: st.DrawFn) -> Exchange:
    """Two or three hosts of one to three members, one lane or two in uneven parts."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=2, max_size=3))
    names = [[f"h{i}/{m}" for m in range(n)] for i, n in enumerate(sizes)]
    inside = [Reduction(devices=tuple(row), transport="gloo") for row in names if len(row) > 1]
    part = draw(st.sampled_from([1.0, 0.7, 0.5]))
    lanes = [tuple(row[0] for row in names), tuple(row[-1] for row in names)]
    reductions = [Reduction(devices=lanes[0], transport="gloo", part=part)]
    if part < 1:
        reductions.append(Reduction(devices=lanes[1], transport="gloo", part=1 - part))
    found = exchange_of([*inside, *reductions], [d for row in names for d in row])
    assert found is not None and all(isinstance(lane, Lane) for lane in found.lanes)
    return found


def parameters(number: int, dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(number)
    return [nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64).to(dtype)) for s in SHAPES]


def on_all(exchange: Exchange, work) -> dict:
    """`work(device, group number, between)` on every device, each in a thread of its own."""
    made = wires(exchange, Post(), summed=True)
    numbers = {d: i for i, group in enumerate(exchange.groups) for d in group}
    with ThreadPoolExecutor(len(made)) as pool:
        waiting = {d: pool.submit(work, d, numbers[d], Between(wire)) for d, wire in made.items()}
        return {d: w.result(timeout=20) for d, w in waiting.items()}


@settings(max_examples=25, deadline=None)
@given(
    exchange=exchanges(),
    weights=st.lists(st.integers(0, 9), min_size=3, max_size=3),
    outer=st.sampled_from([(1.0, 0.0), (0.7, 0.9)]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_an_outer_step_is_that_of_the_weighted_mean_change(
    exchange: Exchange, weights: list[int], outer: tuple[float, float], dtype: torch.dtype
) -> None:
    groups, rounds = len(exchange.groups), 3

    def work(device: str, number: int, between: Between) -> list[torch.Tensor]:
        own = parameters(0, dtype)
        inner = torch.optim.SGD(own, lr=0.1)
        local = LocalSteps(own, inner, between, Group(tuple("abc"[:groups]), number), (1, *outer))
        for turn in range(rounds):
            for p, change in zip(own, parameters(100 + 10 * turn + number, dtype), strict=True):
                p.data.add_(change.detach(), alpha=0.1)
            assert local.took(float(weights[number]))
            told = torch.tensor([float(number + 1)], dtype=torch.float64)
            assert local.meet(told) == []
            members = exchange.groups
            assert float(told) == sum(i + 1 for i in range(len(members)))
        return [p.detach() for p in own]

    found = on_all(exchange, work)
    anchor = parameters(0, dtype)
    sgd = torch.optim.SGD(anchor, lr=outer[0], momentum=outer[1], nesterov=outer[1] > 0)
    whole = sum(weights[:groups])
    for turn in range(rounds if whole else 0):
        for i, p in enumerate(anchor):
            changes = [parameters(100 + 10 * turn + g, dtype)[i].detach() * -0.1 for g in range(groups)]
            p.grad = sum(w * c for w, c in zip(weights, changes, strict=False)) / whole
        sgd.step()
    bound = 1e-12 if dtype == torch.float64 else 3e-6
    some = next(iter(found.values()))
    for own in found.values():
        for mine, want, same in zip(own, anchor, some, strict=True):
            assert torch.allclose(mine, want.detach(), rtol=bound, atol=bound)
            assert torch.equal(mine, same)


@settings(max_examples=25, deadline=None)
@given(exchange=exchanges(), weights=st.lists(st.integers(0, 5), min_size=12, max_size=12))
def test_late_gradients_come_one_step_later_and_none_is_lost(exchange: Exchange, weights: list[int]) -> None:
    """A step of weight 0 is passed by: what came in for it counts in the next one."""
    groups, steps = len(exchange.groups), 4
    weight = [[weights[3 * t + g] for g in range(groups)] for t in range(steps)]

    def gradient(step: int, group: int) -> list[torch.Tensor]:
        return [p.detach() for p in parameters(10 * step + group, torch.float64)]

    def work(device: str, number: int, between: Between) -> list[list[torch.Tensor] | None]:
        late = Late(parameters(0, torch.float64), between)
        seen: list[list[torch.Tensor] | None] = []
        for t in range(steps):
            views, told = gradient(t, number), torch.tensor([float(t)], dtype=torch.float64)
            if weight[t][number]:
                assert late.mix(views, [True, True], float(weight[t][number]), told) == [True, True]
                seen.append(views)
            else:
                late.pass_by(told)
                seen.append(None)
            assert (late.arrived is None) == (t == 0)
        late.arrive()
        return seen

    found = on_all(exchange, work)
    for number, group in enumerate(exchange.groups):
        sums, whole = [torch.zeros(s, dtype=torch.float64) for s in SHAPES], 0
        for t in range(steps):
            for other in range(groups):
                if t and other != number and weight[t - 1][other]:
                    whole += weight[t - 1][other]
                    sums = [
                        s + weight[t - 1][other] * g
                        for s, g in zip(sums, gradient(t - 1, other), strict=True)
                    ]
            own = weight[t][number]
            seen = [found[d][t] for d in group]
            if not own:
                assert all(s is None for s in seen)
                continue
            want = [(s + own * g) / (whole + own) for s, g in zip(sums, gradient(t, number), strict=True)]
            for views in seen:
                assert all(
                    torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(views, want, strict=True)
                )
            sums, whole = [torch.zeros_like(s) for s in sums], 0
