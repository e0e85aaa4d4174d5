"""One device's steps in this process: seconds by cause, verdicts, what travels, who is named on failure."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from evener.core.actions import Action, parse_action
from evener.core.tracebacks import is_out_of_memory
from evener.errors import DataError, ModelError, PeerLostError
from evener.runtime.executor import Executor, StepResult
from evener.runtime.holding import Alone, Settings, whole_model
from evener.runtime.problem import Problem, default_inputs
from evener.runtime.ranks import Ranks
from evener.runtime.wire import SoloWire
from tests.fakes import ScriptedDriver, ThreadedWire, together

X = torch.tensor([[1.0, 2.0], [3.0, -1.0], [0.5, 0.25], [-2.0, 1.0]])
Y = torch.tensor([[1.0], [0.0], [2.0], [-1.0]])


def squared(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def row(text: str) -> tuple[Action, ...]:
    return tuple(parse_action(word) for word in text.split())


GPIPE = row("0F0 0F1 0B0 0B1 0REDUCE_GRAD STEP")


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(2, 1)


def executor(
    *,
    ranks: Ranks | None = None,
    wire: Any = None,
    driver: ScriptedDriver | None = None,
    loss: Callable = squared,
    model: nn.Module | None = None,
    weight: Callable | None = None,
    metrics: tuple[str, ...] = (),
    **settings: Any,
) -> Executor:
    model = model or linear()
    problem = Problem(loss=loss, inputs=default_inputs, weight=weight, metrics=metrics)
    ranks = ranks or Ranks(("lab/a",), "lab/a")
    return Executor(
        whole_model(model, problem, ranks, wire or SoloWire()),
        torch.optim.SGD(model.parameters(), lr=0.5),
        problem,
        ranks,
        driver or ScriptedDriver(),
        Settings(**settings),
    )


def take(ex: Executor, sizes: tuple[int, ...] = (3, 1), number: int = 0, batches: Any = None) -> StepResult:
    edges = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    cut = iter(batches or [(X[a:b], Y[a:b]) for a, b in itertools.pairwise(edges)])
    return ex.step(number, GPIPE, Alone(sizes), lambda *_: next(cut), sum(sizes))


def weights(ex: Executor) -> list[torch.Tensor]:
    return [p.detach().clone() for p in ex.holding.parts[0].module.parameters()]


def test_a_step_alone_is_a_plain_step_over_the_whole_batch():
    ex = executor()
    want = linear()
    squared(want(X), Y).backward()
    result = take(ex)
    for p, q in zip(ex.holding.parts[0].module.parameters(), want.parameters(), strict=True):
        assert torch.allclose(p, q - 0.5 * q.grad, rtol=1e-6)
    assert result.verdict.do == "apply"
    assert result.totals.loss == pytest.approx(squared(linear()(X), Y).item())
    assert (result.totals.weight, result.samples) == (4.0, 4)


def test_actions_beyond_the_micro_batches_of_a_step_are_left_out():
    driver = ScriptedDriver()
    take(executor(driver=driver), sizes=(2,))
    assert [action for action, _ in driver.ran] == ["INPUT", "0F0", "0B0", "STEP"]
    driver = ScriptedDriver()
    ex = executor(driver=driver)
    take(ex, sizes=())
    assert [action for action, _ in driver.ran] == ["STEP"]


def test_equal_work_has_equal_signatures_and_the_last_backward_another():
    driver = ScriptedDriver()
    ex = executor(driver=driver)
    take(ex, sizes=(2, 2))
    take(ex, sizes=(2, 2), number=1)
    signatures = {action: [s for a, s in driver.ran if a == action] for action, _ in driver.ran}
    assert signatures["0F0"] == signatures["0F1"] and len(set(signatures["0F0"])) == 1
    assert len(set(signatures["0B0"])) == 1 and signatures["0B0"] != signatures["0B1"]


def test_seconds_by_cause_and_the_wait_for_a_slower_device():
    def device(rank: int, wire: ThreadedWire) -> StepResult:
        forward_s = (1.0, 4.0)[rank]
        driver = ScriptedDriver({"INPUT": 0.5, "F": forward_s, "B": 2 * forward_s, "STEP": 0.25})
        late = _Late(wire, driver, {0: 9.5, 1: 0.5}[rank])
        name = ("lab/a", "lab/b")[rank]
        ex = executor(ranks=Ranks(("lab/a", "lab/b"), name), wire=late, driver=driver)
        return take(ex, sizes=(2,))

    fast, slow = together(device, 2)
    # a computes 3.5 s, b 12.5 s; a waits 9.5 s for the sum, of which b's computing explains 9.
    assert fast.totals.computed_s == slow.totals.computed_s == {"lab/a": 3.5, "lab/b": 12.5}
    assert fast.seconds == {"input": 0.5, "compute": 3.0, "wait": 9.0, "reduce": 0.5, "optimizer": 0.25}
    assert slow.seconds == {"input": 0.5, "compute": 12.0, "wait": 0.0, "reduce": 0.5, "optimizer": 0.25}
    assert fast.step_s == sum(fast.seconds.values()) and slow.step_s == sum(slow.seconds.values())


class _Late:
    """A wire on which the tally arrives `seconds` after it was launched, on the device's clock."""

    def __init__(self, inner: ThreadedWire, driver: ScriptedDriver, seconds: float) -> None:
        self._inner, self._driver, self._seconds = inner, driver, seconds

    def all_reduce(self, buffer: torch.Tensor, key: str, *, exact_tail: int = 0) -> Any:
        pending = self._inner.all_reduce(buffer, key, exact_tail=exact_tail)
        if not key.endswith("tally"):
            return pending
        return _LatePending(pending, self._driver, self._driver.now_s + self._seconds)


class _LatePending:
    def __init__(self, inner: Any, driver: ScriptedDriver, until_s: float) -> None:
        self._inner, self._driver, self._until_s = inner, driver, until_s

    def wait(self) -> None:
        self._inner.wait()
        self._driver.now_s = max(self._driver.now_s, self._until_s)


def test_a_step_begins_where_the_last_one_ended_unless_paused():
    driver = ScriptedDriver({"F": 1.0})
    ex = executor(driver=driver)
    take(ex)
    driver.now_s += 5.0
    assert take(ex, number=1).step_s == 7.0
    driver.now_s += 5.0
    ex.pause()
    assert take(ex, number=2).step_s == 2.0


def test_seconds_travel_with_the_next_sum_or_on_request():
    ex = executor(driver=ScriptedDriver({"F": 1.0}))
    first = take(ex)
    second = take(ex, number=1)
    assert second.totals.seconds_before["lab/a"]["compute"] == first.seconds["compute"] == 2.0
    assert ex.gather_seconds(2)["lab/a"]["compute"] == 2.0


@pytest.mark.parametrize("do", ["stop", "skip"])
def test_a_nan_loss_moves_nothing_and_the_next_step_is_clean(do):
    ex = executor(on_non_finite=do)
    before = weights(ex)
    result = take(ex, batches=[(X[:3] * float("nan"), Y[:3]), (X[3:], Y[3:])])
    assert (result.verdict.do, result.verdict.devices) == (do, ("lab/a",))
    assert result.totals.loss_sum == 0.0
    assert all(torch.equal(a, b) for a, b in zip(weights(ex), before, strict=True))
    other = executor()
    take(other)
    take(ex, number=1)
    assert all(torch.equal(a, b) for a, b in zip(weights(ex), weights(other), strict=True))


def test_no_memory_is_a_verdict_and_the_data_of_the_step_are_still_read():
    calls = iter([True, False])

    def hungry(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if next(calls, False):
            raise torch.OutOfMemoryError("scripted")
        return squared(output, target)

    driver = ScriptedDriver()
    ex = executor(loss=hungry, driver=driver)
    before = weights(ex)
    result = take(ex)
    assert (result.verdict.do, result.verdict.reason) == ("shrink", "lab/a ran out of memory")
    assert [a for a, _ in driver.ran] == ["INPUT", "0F0", "INPUT", "STEP"]
    assert all(torch.equal(a, b) for a, b in zip(weights(ex), before, strict=True))


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


def test_a_step_that_is_not_taken_leaves_running_statistics_as_they_were() -> None:
    ex = executor(model=normed(), loss=lambda out, y: squared(out, y) * float("nan"), on_non_finite="skip")
    before = [b.clone() for b in ex.holding.parts[0].module.buffers()]
    assert take(ex, sizes=(2, 2)).verdict.do == "skip"
    assert all(torch.equal(a, b) for a, b in zip(ex.holding.parts[0].module.buffers(), before, strict=True))


def test_recomputation_moves_running_statistics_once() -> None:
    ex, again = executor(model=normed()), executor(model=normed())
    again.holding.parts[0] = dataclasses.replace(again.holding.parts[0], recompute=True)
    for one in (ex, again):
        assert take(one, sizes=(2, 2)).verdict.do == "apply"
    pairs = [x.holding.parts[0].module for x in (ex, again)]
    assert all(torch.equal(a, b) for a, b in zip(*(m.buffers() for m in pairs), strict=True))
    assert int(pairs[1][1].num_batches_tracked) == 2


@pytest.mark.parametrize("settings", [{}, {"max_norm": 1.0}, {"loss_scale": 1024.0}], ids=str)
def test_a_step_in_which_nothing_counts_is_skipped_and_says_so(settings):
    ex = executor(weight=lambda batch: 0, **settings)
    before = weights(ex)
    result = take(ex)
    assert (result.verdict.do, result.gradient_norm) == ("skip", None)
    assert "nothing" in result.verdict.reason
    assert all(torch.equal(a, b) for a, b in zip(weights(ex), before, strict=True))
    assert all(p.grad is None for p in ex.holding.parts[0].module.parameters())


def test_metrics_are_summed_over_micro_batches():
    def loss(output: torch.Tensor, target: torch.Tensor) -> Any:
        return squared(output, target), {"above": ((output > 0).sum(), len(output))}

    ex = executor(loss=loss, metrics=("above",))
    above = float((ex.holding.parts[0].module(X) > 0).sum())
    assert take(ex).totals.metrics == {"above": (above, 4.0)}


@pytest.mark.parametrize("max_norm", [0.01, 100.0])
def test_the_norm_is_told_and_clipped_as_torch_clips_it(max_norm):
    ex, want = executor(max_norm=max_norm), linear()
    squared(want(X), Y).backward()
    norm = nn.utils.clip_grad_norm_(want.parameters(), max_norm)
    assert take(ex).gradient_norm == pytest.approx(float(norm), rel=1e-6)
    for p, q in zip(ex.holding.parts[0].module.parameters(), want.parameters(), strict=True):
        assert torch.allclose(p, q - 0.5 * q.grad, rtol=1e-6)


def raising(*_: Any) -> Any:
    raise KeyError("scripted")


def test_a_failing_model_names_device_step_and_action():
    with pytest.raises(ModelError) as e:
        take(executor(loss=raising), number=5)
    assert "forward on lab/a: KeyError: 'scripted' (test_executor.py:" in e.value.what
    assert "step 5, forward of micro-batch 0 on stage 0 (0F0)" in e.value.numbers
    assert e.value.at == (0, 0)


def test_a_failing_backward_says_so():
    with pytest.raises(ModelError, match="backward on lab/a"):
        take(executor(loss=lambda out, y: squared(out, y).detach()))


def test_a_failing_dataset_names_device_and_step():
    with pytest.raises(DataError, match="reading a batch on lab/a failed: KeyError") as e:
        executor().step(3, GPIPE, Alone((4,)), raising, 4)
    assert "step 3" in e.value.numbers


def test_a_backward_in_parts_gives_the_same_step():
    ex, whole = executor(), executor()
    cut = iter([(X[:3], Y[:3]), (X[3:], Y[3:])])
    parts = row("0F0 0I0 0F1 0W0 0I1 0W1 0REDUCE_GRAD STEP")
    result = ex.step(0, parts, Alone((3, 1)), lambda *_: next(cut), 4)
    assert result.totals.loss == take(whole).totals.loss
    for p, q in zip(weights(ex), weights(whole), strict=True):
        assert torch.allclose(p, q, rtol=1e-6)


def test_closed_it_leaves_the_model_alone():
    ex = executor()
    ex.close()
    squared(ex.holding.parts[0].module(X), Y).backward()
    assert ex.holding.parts[0].module.weight.grad is not None


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("Tried to allocate 2 GiB"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), True),
        (RuntimeError("shapes cannot be multiplied"), False),
        (ValueError("can't allocate memory"), False),
    ],
)
def test_what_counts_as_out_of_memory(error, expected):
    assert is_out_of_memory(error) == expected


class _Lost:
    """The wire of a device whose peer has gone before the sums."""

    def all_reduce(self, buffer: torch.Tensor, key: str, *, exact_tail: int = 0) -> "_Lost":
        return self

    def wait(self) -> None:
        raise PeerLostError("lab/b is gone")


def test_an_evaluation_leaves_the_modes_as_they_were_also_when_a_device_is_lost_in_it() -> None:
    """The generation after it trained a model in evaluation mode: no dropout, statistics that stood still."""
    model = nn.Sequential(linear(), nn.Dropout(0.5), nn.BatchNorm1d(1))
    model[2].eval()  # as who trains the rest alone has it
    lost = executor(model=model, ranks=Ranks(("lab/a", "lab/b"), "lab/a"), wire=_Lost())
    with pytest.raises(PeerLostError):
        lost.evaluate(GPIPE, Alone((3,)), lambda *_: (X[:3], Y[:3]), 3)
    assert [m.training for m in model.modules() if not list(m.children())] == [True, True, False]
    alone = executor(model=model)
    alone.evaluate(GPIPE, Alone((3,)), lambda *_: (X[:3], Y[:3]), 3)
    assert [m.training for m in (model, *model)] == [True, True, True, False]


def test_a_step_is_finished_with_what_was_kept_of_another_try() -> None:
    def correct(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, dict]:
        return squared(output, target), {"error": ((output - target).detach().abs().sum(), output.numel())}

    more = {"loss": correct, "metrics": ("error",)}
    whole = take(executor(**more))
    lost = executor(ranks=Ranks(("lab/a", "lab/b"), "lab/a"), wire=_Lost(), **more)
    lost.holding.reducers.outlast(yes=True)
    assert lost.keep(lambda stage, m: (0, 0)) == (None, "")
    with pytest.raises(PeerLostError):
        lost.step(0, GPIPE, Alone((3,)), lambda *_: (X[:3], Y[:3]), 4)
    kept, why = lost.keep(lambda stage, m: (0, 3))
    assert kept is not None and not why
    assert (kept.number, kept.ranges, kept.share.samples) == (0, ((0, 3),), 3)
    lost.drop()
    lost.close()
    alone = executor(model=lost.holding.parts[0].module, **more)
    result = alone.step(0, GPIPE, Alone((1,)), lambda *_: (X[3:], Y[3:]), 4, kept=kept)
    assert result.totals.samples == {"lab/a": 4}
    assert result.totals.loss == pytest.approx(whole.totals.loss)
    assert result.totals.metrics["error"] == pytest.approx(whole.totals.metrics["error"])
    want = linear()
    squared(want(X), Y).backward()
    for p, q in zip(alone.holding.parts[0].module.parameters(), want.parameters(), strict=True):
        assert torch.allclose(p, q - 0.5 * q.grad, rtol=1e-6)


def test_what_would_not_count_is_not_kept_and_it_says_why() -> None:
    lost = executor(ranks=Ranks(("lab/a", "lab/b"), "lab/a"), wire=_Lost())
    with pytest.raises(PeerLostError):
        take(lost, sizes=(4,))
    assert "they were in sums with others'" in lost.keep(lambda stage, m: (0, 4))[1]
    lost.holding.reducers.outlast(yes=True)
    with pytest.raises(PeerLostError):
        take(lost, sizes=(4,), batches=[(X * float("nan"), Y)])
    assert "its loss is not finite" in lost.keep(lambda stage, m: (0, 4))[1]
