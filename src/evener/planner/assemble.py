"""From options to a plan: names for groups, samples for shares, layers for cuts."""

from collections.abc import Sequence

import numpy as np

from evener.core.plan import LeftOut, Pipeline, Plan, Share, Stage
from evener.planner.blocks import Tables
from evener.planner.options import Option, seconds_of


class Names:
    """Hands out the devices of each group, first come first served."""

    def __init__(self, tables: Tables) -> None:
        self._groups = [g.names for g in tables.groups]
        self._taken = [0] * len(self._groups)

    def take(self, option: Option) -> tuple[str, ...]:
        """Devices for the blocks of an option, in order."""
        names = []
        for block in option.blocks:
            for g in block:
                names.append(self._groups[g][self._taken[g]])
                self._taken[g] += 1
        return tuple(names)


def pipeline_of(tables: Tables, option: Option, samples: int, devices: Sequence[str]) -> Pipeline:
    """The option on `devices` as a pipeline that takes `samples` of each global batch."""
    names = iter(devices)
    layers = [x.name for x in tables.model.profile.layers]
    stages = []
    for s, block in enumerate(option.blocks):
        first, last = option.cuts[s], option.cuts[s + 1]
        held = min(len(option.blocks) - s, option.most_micro_batches or len(option.blocks))
        table = tables.stage(block, option.micro_batch, held)
        parts = table.splits[table.split[first, last]]
        shares = tuple(Share(devices=tables.devices_of(next(names)), samples=n) for n in parts)
        stages.append(
            Stage(
                layers=tuple(layers[first:last]),
                shares=shares,
                **table.choices(first, last),
            )
        )
    return Pipeline(samples=samples, micro_batch=option.micro_batch, stages=tuple(stages))


def plan_of(tables: Tables, global_batch: int, parts: Sequence[tuple[Option, int]], left: str = "") -> Plan:
    """The options with their samples as a plan; who is not used is left out with the reason `left`."""
    names = Names(tables)
    pipelines = tuple(pipeline_of(tables, option, n, names.take(option)) for option, n in parts if n)
    used = {d for p in pipelines for d in p.devices}
    out = tuple(LeftOut(device=d.name, reason=left) for d in tables.model.fleet.devices if d.name not in used)
    schedule = "1f1b" if any(len(p.stages) > 1 for p in pipelines) else "gpipe"
    return Plan(global_batch=global_batch, pipelines=pipelines, schedule=schedule, left_out=out)


def curve_of(options: Sequence[Option], global_batch: int, *, beside: bool) -> tuple[list[float], np.ndarray]:
    """(seconds, number of the fastest option) by samples from 0 to the global batch."""
    rows = seconds_of(options, np.arange(global_batch + 1), beside=beside)
    seconds = rows.min(axis=0)
    seconds[0] = 0.0
    return np.maximum.accumulate(seconds).tolist(), rows.argmin(axis=0)
