"""The rival on paced devices: torch's own 1F1B over the text model, in stages of as many blocks each.

torch sends over Gloo as always. With each message goes when it arrives by the fleet file's links; a device
goes on from there, on its own clock, so that what this machine needs to move it does not count. That a send
of torch waits until the other end has posted its receive is not counted either: kinder to torch than a link.
"""

from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from common import run_processes, say
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import pad

from evener.core.fleet import Fleet
from evener.rehearsal.driver import PacedDriver, open_driver
from evener.rehearsal.verdict import Lateness, verdict
from evener.session.recipe import load_recipe

WARM_UP = 3


class Section(nn.Module):
    """Some blocks of the text model, with its embedding before the first and its head behind the last."""

    def __init__(self, model: nn.Module, first: int, end: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*model.blocks[first:end])
        self.embed = model.embed if not first else None
        self.embed_before = model.embed_before if not first else None
        self.position = model.position if not first else None
        self.norm = model.norm if end == len(model.blocks) else None
        self.head = model.head if end == len(model.blocks) else None

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None and self.embed_before is not None and self.position is not None:
            before = pad(x[:, :-1], (1, 0))
            x = self.embed(x) + self.embed_before(before) + self.position[: x.shape[1]]
        x = self.blocks(x)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


class PacedStage(PipelineStage):
    """A stage whose actions take the seconds of a paced device, and whose messages those of its links."""

    def __init__(self, module: nn.Module, rank: int, fleet: Fleet, driver: PacedDriver) -> None:
        super().__init__(module, rank, len(fleet.devices), torch.device("cpu"))
        self.fleet, self.driver = fleet, driver
        self._arrivals: dict[tuple[str, int], Tensor] = {}

    def _come(self, kind: str, chunk: int) -> None:
        """Go on when the message is there; without one, from now on."""
        arrival = self._arrivals.pop((kind, chunk), None)
        self.driver.advance(0.0 if arrival is None else float(arrival))

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._come("F", fwd_chunk_id)
        work = super().forward_one_chunk
        return self.driver.run("0F0", lambda: work(fwd_chunk_id, *args, **kwargs))

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._come("B", bwd_chunk_id)
        work = super().backward_one_chunk
        return self.driver.run("0B0", lambda: work(bwd_chunk_id, *args, **kwargs))

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._with_arrival("F", fwd_chunk_id, super().get_fwd_recv_ops(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._with_arrival("B", bwd_chunk_id, super().get_bwd_recv_ops(bwd_chunk_id))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._with_departure(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._with_departure(super().get_bwd_send_ops(bwd_chunk_id))

    def _with_arrival(self, kind: str, chunk: int, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        if not ops:
            return ops
        arrival = self._arrivals[kind, chunk] = torch.zeros((), dtype=torch.float64)
        return [*ops, dist.P2POp(dist.irecv, arrival, ops[0].peer, ops[0].group)]

    def _with_departure(self, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        if not ops:
            return ops
        here, there = (self.fleet.devices[r].name for r in (self.stage_index, ops[0].peer))
        link = self.fleet.link(here, there)
        assert link is not None
        num_bytes = sum(op.tensor.numel() * op.tensor.element_size() for op in ops)
        arrival = torch.tensor(self.driver.now() + link.curve.seconds(num_bytes), dtype=torch.float64)
        return [*ops, dist.P2POp(dist.isend, arrival, ops[0].peer, ops[0].group)]


def torch_step_s(script: str, fleet: Fleet, micro_batch: int, steps: int) -> tuple[float, bool]:
    """Seconds of a step of an even 1F1B over all devices of `fleet` in their order: the median, and whether
    the devices kept their clocks.
    """
    results = run_processes(_torchs, len(fleet.devices), script, fleet, micro_batch, steps)
    held, sentence = verdict([lateness for _, lateness in results])
    say(f"torch: {sentence}")
    return median(results[0][0]), held


def _torchs(
    rank: int, world_size: int, script: str, fleet: Fleet, micro_batch: int, steps: int
) -> tuple[list[float], Lateness]:
    recipe = load_recipe(script, seed=0)
    driver = open_driver(fleet.devices[rank])
    depth = len(recipe.model.blocks) // world_size
    section = Section(recipe.model, rank * depth, (rank + 1) * depth)
    optimizer = recipe.optimizer(list(section.parameters()))
    stage = PacedStage(section, rank, fleet, driver)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return driver.run("0L0", lambda: recipe.loss(output, target))

    schedule = Schedule1F1B(stage, recipe.global_batch // micro_batch, loss_fn=loss)
    x, y = recipe.batch_of(recipe.global_batch)
    seconds = []
    for _ in range(WARM_UP + steps):
        start = driver.now()
        if rank == 0:
            schedule.step(x, return_outputs=False)
        elif rank == world_size - 1:
            schedule.step(target=y, return_outputs=False)
        else:
            schedule.step(return_outputs=False)
        driver.run("STEP", optimizer.step)
        optimizer.zero_grad()
        seconds.append(driver.now() - start)
    return seconds[WARM_UP:], driver.lateness()
