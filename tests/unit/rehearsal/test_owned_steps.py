"""A step whose state is held in parts: as it is priced, and as paced devices take it on their clocks.

Two devices that own half of one unit each, 3 ms a way, and do two micro-batches of 1 ms forward, 1 ms back:

    optimizer    parameters 0-3 │ F 4  B 5  F 6  B 7                     │ gradients 7-10
    gradients    parameters 0-3 │ F 4  B 5  F 6  B 7     gradients 5-8   │ gradients 8-11
    parameters   parameters 0-3 │ F 4  B 5  again 5-8  F 9  B 10         │ gradients 10-13
"""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from evener.core.figures import Figure, line
from evener.core.fleet import Device, Fleet, Link
from evener.core.plan import Held, Ownership, Pipeline, Plan, Share, Stage
from evener.core.profile import Layer, Profile, Timing
from evener.core.routes import Routes
from evener.cost.model import CostModel
from evener.cost.owned import play_owned
from evener.cost.trainer import Trainer
from evener.rehearsal.driver import PacedDriver
from evener.rehearsal.post import PacedPost
from evener.rehearsal.wire import open_wire
from evener.runtime.executor import Executor, StepResult
from evener.runtime.holding import Holding, Settings
from evener.runtime.owning.means import Means
from evener.runtime.owning.owned import Owned
from evener.runtime.parts import Part
from evener.runtime.problem import Problem, default_inputs
from evener.runtime.ranks import Ranks
from evener.schedules import make
from tests.fakes import PostOffice, ThreadedWire, together
from tests.unit.rehearsal.fakes import FakeClock

NAMES = ("lab/a", "lab/b")
WIDTH = 64
UNIT_BYTES = WIDTH * WIDTH * 4
PRODUCT_FLOP = 2 * WIDTH * WIDTH  # of one sample and one layer
STEPS = 3


@dataclass(frozen=True, kw_only=True)
class Job:
    """`forward_s` is that of a sample in a layer, `way_s` that of a unit's bytes over the link; by device."""

    held: Held
    way_s: float
    depth: int = 1
    forward_s: tuple[float, float] = (1e-3, 1e-3)
    rounds: tuple[int, int] = (2, 2)
    parts: tuple[int, int] = (1, 1)
    is_tied: bool = False  # the last layer's weight is the first one's

    @property
    def fleet(self) -> Fleet:
        rates = [Figure(value=PRODUCT_FLOP / s, source="assumed") for s in self.forward_s]
        devices = tuple(
            Device(name=n, kind=n, flops={"float32": r}) for n, r in zip(NAMES, rates, strict=True)
        )
        return Fleet(
            devices=devices, links=(Link(a="lab", b="lab", curve=line(1e-9, UNIT_BYTES / self.way_s)),)
        )

    @property
    def plan(self) -> Plan:
        layers = tuple(str(i) for i in range(self.depth))
        pipelines = tuple(
            Pipeline(
                samples=rounds,
                micro_batch=1,
                stages=(Stage(layers=layers, shares=(Share(devices=(name,), samples=1),)),),
            )
            for name, rounds in zip(NAMES, self.rounds, strict=True)
        )
        parts = dict(zip(NAMES, self.parts, strict=True))
        owners = tuple(Ownership(layer=x, parts=parts, held=self.held) for x in layers)
        return Plan(global_batch=sum(self.rounds), schedule="1f1b", pipelines=pipelines, owners=owners)

    @property
    def profile(self) -> Profile:
        layers = tuple(
            Layer(
                name=str(i),
                num_params=WIDTH * WIDTH,
                param_bytes=UNIT_BYTES,
                output_bytes_per_sample=4 * WIDTH,
                saved_bytes_per_sample=4 * WIDTH,
                flops_per_sample=float(PRODUCT_FLOP),
                tied=(str(self.depth - 1 - i),) if self.is_tied and i in (0, self.depth - 1) else (),
            )
            for i in range(self.depth)
        )
        timings = tuple(
            Timing(
                layer=layer.name,
                kind=name,
                micro_batch=size,
                forward_s=measured(size * one_s),
                backward_s=measured(size * one_s * (2 if i else 1)),  # nobody asks for the input's gradient
                update_s=measured(1e-9),
            )
            for i, layer in enumerate(layers)
            for name, one_s in zip(NAMES, self.forward_s, strict=True)
            for size in (1, 2)
        )
        return Profile(model="m", layers=layers, timings=timings)

    def priced_s(self) -> float:
        trainer = Trainer(bucket_bytes=UNIT_BYTES)
        return play_owned(
            CostModel(fleet=self.fleet, profile=self.profile, trainer=trainer), self.plan
        ).step_s

    def rehearsed(self) -> list[StepResult]:
        """The last step as each device took it."""
        office = PostOffice()

        def run(rank: int, wire: ThreadedWire) -> StepResult:
            try:
                return self._on_device(NAMES[rank], office, wire)
            except BaseException as e:
                office.leave(f"{NAMES[rank]} failed: {type(e).__name__}: {e}")
                raise

        return together(run, len(NAMES))

    def _on_device(self, here: str, office: PostOffice, wire: ThreadedWire) -> StepResult:
        clock, fleet, plan, cpu = FakeClock(), self.fleet, self.plan, torch.device("cpu")
        driver, ranks = PacedDriver(fleet.device(here), clock, clock.sleep), Ranks(NAMES, here)
        paced = open_wire(wire, driver, fleet, NAMES)
        post = PacedPost(office.post(here), driver, fleet)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(self.depth)))
        if self.is_tied:
            model[-1].weight = model[0].weight
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        means = Means(ranks=ranks, post=post, wire=paced, device=cpu, now=driver.now)
        owned = Owned(model, optimizer, plan, means, unit_bytes=UNIT_BYTES)
        problem, stage = Problem(loss=nn.functional.mse_loss, inputs=default_inputs), NAMES.index(here)
        part = Part(stage=stage, module=model, problem=problem, device=cpu)
        holding = Holding(parts={stage: part}, reducers=owned.reducers(), wire=paced, owned=owned)
        executor = Executor(holding, optimizer, problem, ranks, driver, Settings())
        row, routes = make(plan).actions[here], Routes(plan)
        batch = torch.ones(1, WIDTH), torch.zeros(1, WIDTH)
        results = [
            executor.step(number, row, routes, lambda s, m: batch, plan.global_batch)
            for number in range(STEPS)
        ]
        executor.close()
        assert driver.lateness().guessed == 0, "what is launched in an action is the same in each of its kind"
        return results[-1]


def measured(value: float) -> Figure:
    return Figure(value=value, source="measured")


@pytest.mark.parametrize(
    ("held", "step_s"), [("optimizer", 10e-3), ("gradients", 11e-3), ("parameters", 13e-3)]
)
def test_a_step_by_hand_as_priced_and_as_rehearsed(held: Held, step_s: float) -> None:
    job = Job(held=held, way_s=6e-3)  # half of a unit goes each way
    assert job.priced_s() == pytest.approx(step_s, rel=1e-3)
    for result in job.rehearsed():
        assert result.step_s == pytest.approx(step_s, rel=0.01)
        waits_s = 6e-3 if held == "parameters" else 3e-3
        assert result.seconds["transfer"] == pytest.approx(waits_s, rel=0.02), "before forwards, in the trace"
        assert result.seconds["compute"] == pytest.approx(4e-3, rel=0.01)


@pytest.mark.parametrize("held", ["optimizer", "gradients", "parameters"])
@pytest.mark.parametrize("rounds", [(1, 1), (3, 3), (3, 1)])
@pytest.mark.parametrize("way_s", [0.1e-3, 2e-3, 9e-3])
def test_four_units_of_unequal_owners_take_what_they_are_priced(
    held: Held, rounds: tuple[int, int], way_s: float
) -> None:
    """Links that hide behind computing, that are about as fast, and that all waits for."""
    job = Job(held=held, way_s=way_s, depth=4, forward_s=(1e-3, 1.7e-3), rounds=rounds, parts=(5, 3))
    for result in job.rehearsed():
        assert result.step_s == pytest.approx(job.priced_s(), rel=0.03)


@pytest.mark.parametrize("way_s", [2e-3, 9e-3])
def test_tied_parameters_come_once_before_a_forward(way_s: float) -> None:
    job = Job(held="parameters", way_s=way_s, depth=5, forward_s=(1e-3, 1.3e-3), is_tied=True)
    for result in job.rehearsed():
        assert result.step_s == pytest.approx(job.priced_s(), rel=0.03)


def test_gradients_of_who_has_one_micro_batch_where_others_have_two_keep_nobody_waiting() -> None:
    """Parameters till 1.5 ms, both compute till 5.5; a's first gradients leave 3.5-5, all others till 7."""
    job = Job(held="gradients", way_s=3e-3, forward_s=(1e-3, 2e-3), rounds=(2, 1))
    assert job.priced_s() == pytest.approx((1.5 + 4 + 1.5) * 1e-3, rel=1e-3)
    for result in job.rehearsed():
        assert result.step_s == pytest.approx(7e-3, rel=0.02)
