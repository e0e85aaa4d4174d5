"""A stage between others that are shared out: what comes in pieces, and memory that runs out on the way."""

from typing import Any

import pytest
import torch
from torch import nn

from evener.core.actions import parse_action
from evener.core.plan import Pipeline, Plan, Share, Stage
from evener.core.routes import Routes
from evener.runtime import step as step_module
from evener.runtime.cutting import cut
from evener.runtime.executor import Executor, StepResult
from evener.runtime.holding import Holding, Settings
from evener.runtime.parts import Part
from evener.runtime.problem import Problem, default_inputs
from evener.runtime.ranks import Ranks
from evener.runtime.reducers import reducers_of_one_model
from evener.runtime.wire import SoloWire
from tests.fakes import ScriptedDriver

HERE, CPU = "lab/a", torch.device("cpu")
SHARED = (Share(devices=("lab/b",), samples=3), Share(devices=("lab/c",), samples=1))
ALONE = (Share(devices=(HERE,), samples=4),)
LAYERS = (("0",), ("1", "2"))
X = torch.arange(16.0).view(8, 2) / 16


class Sent:
    """A message that has left, or that is there."""

    def __init__(self, tensors: tuple[torch.Tensor, ...] = ()) -> None:
        self.tensors, self.sent_s = tensors, None

    def wait(self) -> tuple[torch.Tensor, ...]:
        return self.tensors


class TooLarge(Sent):
    """A message for which the device has no room."""

    def wait(self) -> tuple[torch.Tensor, ...]:
        raise torch.OutOfMemoryError("Tried to allocate 2 GiB")


class Weighed(SoloWire):
    """Sums in which the others tell the weight of all samples, as who has the last stage does."""

    def all_reduce(self, buffer: Any, key: str, *, exact_tail: int = 0) -> Any:
        if key.endswith("tally"):
            buffer[1] = 8.0
        return super().all_reduce(buffer, key)


class Others:
    """A channel to devices that answer each micro-batch that they were given with pieces of ones."""

    def __init__(self, direction: str, empty: tuple[int, ...] = (), too_large: tuple[int, ...] = ()) -> None:
        self.direction, self.empty, self.too_large = direction, empty, too_large
        self.sent: list[tuple[str, str, tuple[torch.Tensor, ...]]] = []

    def send(self, tensors: tuple[torch.Tensor, ...], to: str, key: str) -> Sent:
        self.sent.append((to, key.partition(" ")[0], tensors))
        return Sent()

    def receive(self, source: str, key: str, *, device: torch.device) -> Sent:
        number = int(key.partition(f"SEND_{self.direction}")[2].partition(" ")[0])
        if number in self.empty:
            return Sent()
        if number in self.too_large:
            return TooLarge()
        samples = 3 if source == "lab/b" else 1
        return Sent((torch.ones(samples, 5, requires_grad=self.direction == "F"),))

    def close(self) -> None:
        return


def executor_of(number: int, channel: Others) -> tuple[Executor, Routes]:
    """The device that holds stage `number`, all of it, of two; the other one is shared by b and c."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 3))
    shares = (ALONE, SHARED) if number == 0 else (SHARED, ALONE)
    stages = tuple(Stage(layers=n, shares=s) for n, s in zip(LAYERS, shares, strict=True))
    plan = Plan(
        global_batch=8, pipelines=(Pipeline(samples=8, micro_batch=4, stages=stages),), schedule="gpipe"
    )
    problem = Problem(loss=nn.functional.mse_loss, inputs=default_inputs)
    made = cut(model, list(LAYERS), example=((torch.randn(3, 2),), {}))
    module, ranks = made.stages[number], Ranks((HERE,), HERE)
    part = Part(
        stage=number,
        module=module,
        problem=problem,
        device=CPU,
        is_first=number == 0,
        is_last=number == 1,
        ends=made,
    )
    reducers = reducers_of_one_model(module, ranks, SoloWire(), number)
    holding = Holding(parts={number: part}, reducers=reducers, wire=Weighed(), channel=channel)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    return Executor(holding, optimizer, problem, ranks, ScriptedDriver(), Settings()), Routes(plan)


ROWS = (
    "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE_GRAD STEP",
    "1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1 1REDUCE_GRAD STEP",
)


def take(number: int, channel: Others) -> StepResult:
    executor, routes = executor_of(number, channel)
    row = tuple(parse_action(word) for word in ROWS[number].split())
    batches = [(x, torch.zeros(4, 3)) for x in X.split(4)]
    return executor.step(0, row, routes, lambda stage, micro_batch: batches[micro_batch], 8)


@pytest.mark.parametrize("number", [0, 1])
def test_what_comes_in_pieces_is_one_micro_batch(number: int) -> None:
    channel = Others("BF"[number])
    assert take(number, channel).verdict.do == "apply"
    assert [(to, len(tensors[0])) for to, _, tensors in channel.sent] == [("lab/b", 3), ("lab/c", 1)] * 2


def test_gradients_that_come_back_after_memory_ran_out_count_for_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first micro-batch was on its way when the second found no room: its gradients came back in pieces.

    Joining them for outputs that were let go ended the device with a ValueError, and so the job.
    """
    ran = []
    plain = Part.forward

    def forward(self: Part, *args: Any) -> Any:
        ran.append(len(ran))
        if len(ran) == 2:
            raise torch.OutOfMemoryError("Tried to allocate 2 GiB")
        return plain(self, *args)

    monkeypatch.setattr(Part, "forward", forward)
    channel = Others("B", empty=(1,))
    verdict = take(0, channel).verdict
    assert verdict.do == "shrink" and verdict.devices == (HERE,)
    assert [tensors for _, key, tensors in channel.sent if key.endswith("F1")] == [(), ()]


@pytest.mark.parametrize("number", [0, 1])
def test_no_room_to_join_pieces_is_a_vote_as_in_a_layer(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was an unexpected error: pieces were joined outside of what may run out of memory."""

    def join(pieces: list, slots: Any, rest: Any) -> Any:
        raise torch.OutOfMemoryError("Tried to allocate 2 GiB")

    monkeypatch.setattr(step_module, "join_samples", join)
    verdict = take(number, Others("BF"[number])).verdict
    assert verdict.do == "shrink" and verdict.devices == (HERE,)


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("which", [0, 1])
def test_no_room_for_what_comes_is_a_vote_too(number: int, which: int) -> None:
    """A card that was full when activations came ended the job; one that is full in a layer takes less."""
    channel = Others("BF"[number], too_large=(which,))
    verdict = take(number, channel).verdict
    assert verdict.do == "shrink" and verdict.devices == (HERE,)
    assert len(channel.sent) == 4, "nobody may wait for what will not come"
