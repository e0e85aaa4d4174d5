"""The numbers that schedules and simulator work with: seconds and bytes of one plan, stage by stage."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from evener.core.figures import Curve
from evener.core.routes import Routes
from evener.core.words import counted
from evener.errors import UnknownNameError


@dataclass(frozen=True, kw_only=True)
class Wire:
    """How data gets from one device to another; without a curve it takes no time.

    A message of n bytes holds the wire for `curve.seconds(n) - latency` and arrives one latency later; the
    latency is the curve's first point. Messages of one device pair and direction go one after another;
    pairs that name the same `bus` share its rate.
    """

    curve: Curve | None = None
    bus: str | None = None

    def occupied_s(self, num_bytes: float) -> float:
        """Seconds the wire is taken. Example: line(1e-3, 1e9) and 1e6 bytes give 0.001."""
        return self.curve.seconds(num_bytes) - self.latency_s if self.curve else 0.0

    @property
    def latency_s(self) -> float:
        return self.curve.points[0][1] if self.curve else 0.0


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """One sum of gradients over the devices that hold the same layers.

    `holders` are (stage, device). `pieces` are (seconds, ready): a piece may start when every holder has done
    its part `ready` of its stage's last backward action; 1.0 is its end. One after another, in order.
    Example for two holders: ((0.002, (0.5, 0.4)), (0.003, (1.0, 1.0))).
    """

    layers: tuple[str, ...]
    holders: tuple[tuple[int, str], ...]
    pieces: tuple[tuple[float, tuple[float, ...]], ...]

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(device for _, device in self.holders))


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one device: its limit, what is always there, and by stage what a sample in flight adds."""

    limit_bytes: float | None = None
    fixed_bytes: float = 0.0
    saved_bytes: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds and bytes of one plan.

    `compute_s` maps (stage, device, "F" | "B" | "I" | "W", samples) to seconds; without "I" and "W" a
    backward cannot be split. `output_bytes` maps a stage to bytes per sample that it hands on; gradients
    are as large.
    `input_s` maps (stage, device, samples) to seconds spent on getting a micro-batch ready before its
    forward.
    `gather_s` maps (stage, device, "F" | "B", micro-batch) to seconds that it waits for parameters of owners.
    `update_s` is the optimiser's time by device, `overhead_s` what else a device spends once a step,
    `agree_s` the agreement on the step. `notes` say what was assumed, `split_note`
    how I and W were had, for schedules that use them.
    """

    compute_s: Mapping[tuple[int, str, str, int], float]
    output_bytes: Mapping[int, float] = field(default_factory=dict)
    wires: Mapping[tuple[str, str], Wire] = field(default_factory=dict)
    reductions: tuple[Reduction, ...] = ()
    input_s: Mapping[tuple[int, str, int], float] = field(default_factory=dict)
    gather_s: Mapping[tuple[int, str, str, int], float] = field(default_factory=dict)
    update_s: Mapping[str, float] = field(default_factory=dict)
    overhead_s: Mapping[str, float] = field(default_factory=dict)
    agree_s: float = 0.0
    memory: Mapping[str, Memory] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    split_note: str = ""

    def action_s(self, stage: int, device: str, kind: str, samples: int, micro_batch: int = -1) -> float:
        """Seconds of one compute action, input included, and of `micro_batch` what it waits for parameters.

        UnknownNameError names the entry that is missing.
        """
        try:
            seconds = self.compute_s[stage, device, kind, samples]
            seconds += self.gather_s.get((stage, device, kind, micro_batch), 0.0)
            return seconds + self.input_s.get((stage, device, samples), 0.0) if kind == "F" else seconds
        except KeyError:
            raise UnknownNameError(
                f"no seconds for {kind} of stage {stage} on {device} with {counted(samples, 'sample')}",
                remedy="a profile of that kind measured at that size",
            ) from None

    def wire(self, source: str, target: str) -> Wire:
        """The wire from `source` to `target`; UnknownNameError when there is none."""
        try:
            return self.wires[source, target]
        except KeyError:
            raise UnknownNameError(
                f"no link from {source} to {target}, and the plan sends between them",
                remedy="a link between the two devices or their hosts in the fleet file",
            ) from None

    def lead_s(self, device: str) -> tuple[float, float]:
        """(optimizer, overhead) seconds of `device` between the barrier of a step and its next forward."""
        return self.agree_s + self.update_s.get(device, 0.0), self.overhead_s.get(device, 0.0)

    @property
    def splits_backward(self) -> bool:
        """True when backward can be run in its input and weight part."""
        return any(key[2] == "I" for key in self.compute_s)


def unit_costs(routes: Routes) -> Costs:
    """Every stage takes the same time and data moves at once: the shape of a schedule without its numbers."""
    seconds = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
    compute: dict[tuple[int, str, str, int], float] = {}
    wires: dict[tuple[str, str], Wire] = {}
    for device in routes.devices:
        for stage, m in routes.work(device):
            for kind, s in seconds.items():
                compute[stage, device, kind, routes.samples(stage, device, m)] = s
    for route in routes.stages:
        for m in range(len(route.sizes)):
            for piece in routes.forward_pieces(route.number, m) + routes.backward_pieces(route.number, m):
                wires[piece.source, piece.target] = Wire()
    return Costs(compute_s=compute, wires=wires)
