"""A profile without a measurement: seconds from a model's formulas and the figures of a fleet's kinds.

    seconds = max(FLOPs / (rate · EFFICIENCY), bytes / bandwidth) + operations · launch

Every figure is of source "assumed" with a spread of SPREAD, so that a plan shows how little is known.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace

from evener.core.catalogue import near_kinds
from evener.core.figures import Figure
from evener.core.fleet import Device, Fleet
from evener.core.profile import Layer, Profile, StepTiming, Timing
from evener.core.transformer import BYTES, Transformer, chain, group_bytes
from evener.cost.communication import Network
from evener.cost.memory import model_bytes, stage_memory
from evener.errors import UnknownNameError, UsageError

EFFICIENCY = 0.5
"""Part of the published rate that a whole layer gets (assumed; Narayanan et al. 2021 report 0.44 to 0.52)."""
SPREAD = 0.3
"""Relative spread of every assumed figure."""
OPERATIONS = {"embed": 3, "block": 14, "head": 4}
"""Operations that a layer's forward launches (assumed); the backward launches twice as many."""
ADAM_BYTES = 28
"""Bytes that Adam moves for a parameter: reads it, its gradient and two moments, writes three."""
STATE_BYTES = 8
"""Bytes of Adam's two moments for a parameter, float32."""
DEGREES = (2, 4, 8)
_SUMS = {"embed": (1, 0), "block": (2, 2), "head": (0, 1)}
_SIZES = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, kw_only=True)
class KindFigures:
    """What the formula needs of a kind: FLOP/s, bytes/s, seconds an operation."""

    flops: float
    bytes_per_s: float
    launch_s: float


def profile_from_config(
    model: Transformer, fleet: Fleet, *, global_batch: int, precision: str = "float32"
) -> Profile:
    """The profile of `model` on every kind of `fleet`, all of it assumed, for Adam and float32 parameters.

    Micro-batches are powers of two up to 64 and the global batch. Kinds that have a host with 2, 4 or 8
    linked devices are given in tensor-parallel groups as well: a group's layer computes its part, then sums
    its output over the group (twice in a block's forward and in its backward, Shoeybi et al. 2019).
    Raises UnknownNameError for a kind whose figures are nowhere, UsageError for one kind with two figures.
    Example: GPT-2 on an A100 at 19.5 TFLOP/s, one sample: 2.92e11 / 9.75e12 = 30 ms and 1.8 ms of launches.
    """
    kinds = _kinds(fleet, precision)
    layers = chain(model, precision)
    sizes = [b for b in _SIZES if b <= global_batch]
    rows: list[Timing] = []
    degrees: set[int] = set()
    for kind, figures in kinds.items():
        for degree, sum_s in _degrees(model, fleet, kind, precision):
            degrees.add(degree)
            rows += _timings(layers, kind, figures, (degree, sum_s), sizes, precision)
    profile = Profile(
        model=model.name,
        layers=layers,
        timings=tuple(rows),
        group_bytes=tuple(g for d in sorted(degrees - {1}) for g in group_bytes(model, precision, d)),
        gradient_bytes=4 * model.num_params,
        state_bytes=STATE_BYTES * model.num_params,
        note=(
            f"{model.name} by its configuration: {EFFICIENCY:.0%} of each kind's {precision} rate, give or "
            f"take {SPREAD:.0%}; Adam, float32 parameters, a sample of {model.sequence} tokens"
        ),
    )
    return replace(profile, steps=tuple(_steps(profile, kinds, sizes)))


def _kinds(fleet: Fleet, precision: str) -> dict[str, KindFigures]:
    if precision not in BYTES:
        raise UsageError(f"no precision is called {precision!r}", remedy=f"one of: {', '.join(BYTES)}")
    found: dict[str, KindFigures] = {}
    for device in fleet.devices:
        figures = _figures(device, precision)
        if found.setdefault(device.kind, figures) != figures:
            raise UsageError(
                f"devices of kind {device.kind!r} have different figures, {device.name} for one",
                numbers=f"{found[device.kind].flops:.4g} and {figures.flops:.4g} FLOP/s",
                remedy="a kind of its own for each speed",
            )
    return found


def _figures(device: Device, precision: str) -> KindFigures:
    rate = device.flops.get(precision)
    if rate is None and device.flops:
        raise UnknownNameError(
            f"{device.name} ({device.kind}) has no rate for {precision}",
            numbers=f"rates known: {', '.join(device.flops)}",
            remedy=f"--precision {next(iter(device.flops))}, or a fleet without it",
        )
    if rate is None or device.bytes_per_s is None:
        near = ", ".join(near_kinds(device.kind)) or "none"
        raise UnknownNameError(
            f"{device.name} has no figures, and the catalogue holds no kind {device.kind!r}",
            numbers=f"names like it: {near}",
            remedy="one of those kinds, or flops, bytes_per_s and memory_bytes in the fleet file",
        )
    launch = device.launch_s.value if device.launch_s else 0.0
    if not launch:
        raise UsageError(
            f"{device.name} ({device.kind}) has no launch_s",
            remedy='"launch_s": {"value": 1e-5, "source": ...}',
        )
    return KindFigures(flops=rate.value, bytes_per_s=device.bytes_per_s.value, launch_s=launch)


def _degrees(
    model: Transformer, fleet: Fleet, kind: str, precision: str
) -> Iterator[tuple[int, Callable[[int], float]]]:
    """(degree, seconds to sum a layer's output of so many samples) of each group a host can form."""
    hosts: dict[str, list[str]] = defaultdict(list)
    for device in fleet.devices:
        if device.kind == kind:
            hosts[device.host].append(device.name)
    network = Network(fleet=fleet)
    sample_bytes = model.sequence * model.hidden * BYTES[precision]

    def slowest(teams: Sequence[tuple[str, ...]], samples: int) -> float:
        return max((network.all_reduce_s(team, samples * sample_bytes) for team in teams), default=0.0)

    yield 1, partial(slowest, ())
    for degree in DEGREES:
        teams = {tuple(names[:degree]) for names in hosts.values() if len(names) >= degree}
        linked = [team for team in teams if None not in network.hops(team)]
        if linked and len(linked) == len(teams) and model.num_heads % degree == 0:
            yield degree, partial(slowest, linked)


def _timings(
    layers: Sequence[Layer],
    kind: str,
    figures: KindFigures,
    parts: tuple[int, Callable[[int], float]],
    sizes: Sequence[int],
    precision: str,
) -> Iterator[Timing]:
    """Rows of one kind at one degree; equal blocks share their figures."""
    degree, sum_s = parts
    made: dict[tuple, tuple[Figure, Figure, Figure]] = {}
    for samples in sizes:
        for layer in layers:
            type_ = layer.name if layer.name in OPERATIONS else "block"
            if (type_, samples) not in made:
                moved = layer.num_params * BYTES[precision] + 2.0 * samples * layer.saved_bytes_per_sample
                work = samples * layer.flops_per_sample / (figures.flops * EFFICIENCY)
                busy = max(work, moved / figures.bytes_per_s) / degree + OPERATIONS[type_] * figures.launch_s
                sums = sum_s(samples)
                made[type_, samples] = (
                    _assumed(busy + _SUMS[type_][0] * sums),
                    _assumed(2 * busy + _SUMS[type_][1] * sums),
                    _assumed(ADAM_BYTES * layer.num_params / degree / figures.bytes_per_s),
                )
            forward, backward, update = made[type_, samples]
            yield Timing(
                layer=layer.name,
                kind=kind,
                micro_batch=samples,
                tensor_parallel=degree,
                forward_s=forward,
                backward_s=backward,
                update_s=update,
            )


def _steps(profile: Profile, kinds: dict[str, KindFigures], sizes: Sequence[int]) -> Iterator[StepTiming]:
    """The whole model on one device: sums over the layers, with a tied matrix held and updated once."""
    held = model_bytes(profile)
    once = profile.gradient_bytes / sum(x.param_bytes for x in profile.layers)
    twice = (1 - once) * float(held.parameters[-1] + held.gradients[-1] + held.optimizer[-1])
    for kind, figures in kinds.items():
        for samples in sizes:
            rows = [
                t
                for t in profile.timings
                if t.kind == kind and t.micro_batch == samples and t.tensor_parallel == 1
            ]
            peak = stage_memory(held, 0, len(profile.layers), samples=samples, in_flight=1).total - twice
            yield StepTiming(
                kind=kind,
                micro_batch=samples,
                forward_s=_assumed(sum(t.forward_s.value for t in rows if t.forward_s)),
                backward_s=_assumed(sum(t.backward_s.value for t in rows if t.backward_s)),
                update_s=_assumed(ADAM_BYTES * profile.gradient_bytes / 4 / figures.bytes_per_s),
                peak_bytes=Figure(value=peak, source="assumed"),
            )


def _assumed(seconds: float) -> Figure:
    return Figure(value=seconds, source="assumed", spread=SPREAD)
