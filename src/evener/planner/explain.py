"""Why a plan is as it is: who is left out, what limits, what was assumed, what else there is, what helps."""

from collections.abc import Iterable, Sequence

from evener.core.collectives import ring
from evener.core.figures import Value
from evener.core.job import Job
from evener.core.plan import LeftOut, Prediction
from evener.core.split import apportion
from evener.core.words import counted
from evener.planner.aim import Aim
from evener.planner.groups import Group, ms
from evener.planner.result import Alternative, PlanResult
from evener.planner.subsets import Pool, Split

_WORTH_IT = 0.01


def left_out(pool: Pool, job: Job, groups: tuple[Group, ...], split: Split, aim: Aim) -> tuple[LeftOut, ...]:
    """Each device without samples, and the sentence why."""
    reasons: dict[str, str] = {n: g.refusal for g in groups for n in g.names if not g.cap}
    base = pool.counts_of(split.samples)
    for g, group in enumerate(pool.groups):
        idle = [n for n in group.names if n not in split.samples]
        if idle and job.batch_per_device is not None:
            reasons.update(dict.fromkeys(idle, "the given split gives it no sample"))
        elif idle and len(split.samples) >= job.global_batch:
            words = f"the global batch has {counted(job.global_batch, 'sample')} and faster devices take them"
            reasons.update(dict.fromkeys(idle, words))
        elif idle:
            more = (*base[:g], base[g] + 1, *base[g + 1 :])
            reasons.update(dict.fromkeys(idle, _worse(pool.split(more, least=1), split, aim)))
    return tuple(
        LeftOut(device=d.name, reason=reasons[d.name]) for d in pool.fleet.devices if d.name in reasons
    )


def _worse(with_it: Split | None, split: Split, aim: Aim) -> str:
    if with_it is None:
        return "it cannot take a share of this batch"
    if not aim.allowed(with_it.samples):
        return (
            f"with it an hour costs {aim.per_hour(with_it.samples):.4g}, the limit is "
            f"{aim.max_price_per_hour:.4g}"
        )
    sums = [
        ms(s.step_s) + (f" and costs {s.step_s * aim.weight(s.samples):.3g}" if aim.by_money else "")
        for s in (with_it, split)
    ]
    return f"with it a step takes {sums[0]}, without it {sums[1]}"


def limiter(prediction: Prediction) -> str:
    """The sentence what the step of the device that waits for nobody is made of."""
    name = min(prediction.seconds, key=lambda n: prediction.seconds[n]["wait"])
    causes = prediction.seconds[name]
    cause = max(causes, key=lambda c: causes[c])
    what = {
        "compute": f"{name} computes for",
        "reduce": "the gradient reduction shows for",
        "transfer": (
            f"{name} waits for parameters of other owners for"
            if prediction.owned_bytes
            else f"{name} waits for gradients of tables' rows on their way to its host for"
        ),
        "wait": f"{name} waits for slower devices for",
        "input": f"{name} waits for data for",
        "optimizer": f"the optimiser on {name} takes",
        "overhead": f"fixed costs on {name} take",
    }[cause]
    return f"{what} {ms(causes[cause])} of a step of {ms(prediction.step_s)}"


def assumptions(pool: Pool, groups: tuple[Group, ...], split: Split, job: Job) -> tuple[str, ...]:
    """What the plan takes for granted because a file does not say it; empty when everything was measured."""
    said = []
    if len(split.samples) > 1 and any(hop is None for hop in ring(pool.fleet, tuple(split.samples))):
        said.append("assumed: a reduction over devices between which the fleet names no link costs nothing")
    unknown = [n for g in groups if g.usable_bytes == float("inf") for n in g.names if n in split.samples]
    if unknown:
        said.append(f"assumed: enough memory on {', '.join(unknown)}, whose memory the fleet does not give")
    for group, load in zip(pool.groups, pool.loads, strict=True):
        if not load.cost.peak_bytes.any():
            said.append(f"assumed: memory of {group.kind} suffices, the profile holds no peak bytes for it")
        if job.micro_batch is not None and job.micro_batch > load.cap:
            said.append(
                f"{group.names[0]} takes at most {counted(load.cap, 'sample')}, not {job.micro_batch} at once"
            )
    return tuple(dict.fromkeys(said))


def alternatives(pool: Pool, prediction: Prediction, job: Job, aim: Aim) -> tuple[Alternative, ...]:
    """The best single device, even data parallelism and the split by solo speed, with predicted seconds."""
    names = [n for g in pool.groups for n in g.names]
    names = [d.name for d in pool.fleet.devices if d.name in names]
    solo = prediction.solo_samples_per_s
    found = []
    if solo:
        best = max(solo, key=lambda n: solo[n])
        found.append(
            Alternative(
                name="best single device",
                step_s=job.global_batch / solo[best],
                samples={best: job.global_batch},
                note=_too_dear((best,), aim),
            )
        )
    for label, weights in (
        ("even data parallel", [1.0] * len(names)),
        ("share by speed", [solo.get(n, 0.0) for n in names]),
    ):
        if len(names) > 1 and any(weights):
            parts = dict(zip(names, apportion(job.global_batch, weights), strict=True))
            fixed = pool.fixed({n: k for n, k in parts.items() if k})
            note = _too_dear(fixed.samples, aim) if fixed else "does not fit"
            found.append(
                Alternative(name=label, step_s=fixed.step_s if fixed else None, samples=parts, note=note)
            )
    return tuple(found)


def _too_dear(names: Iterable[str], aim: Aim) -> str:
    held = tuple(names)
    return "" if aim.allowed(held) else f"{aim.per_hour(held):.4g} an hour, over the limit"


class Advice(Value, frozen=True, kw_only=True):
    """What a change would do: the predicted gain in samples a second (0.1 is a tenth more), or why it
    fails.
    """

    change: str
    gain: float | None = None
    step_s: float | None = None
    helps: bool = False
    sentence: str = ""


def advice(result: PlanResult, worlds: Sequence[Alternative]) -> tuple[Advice, ...]:
    """What would help and what would not, the best first: plans of changed worlds against this one.

    A change helps that gives a hundredth more samples a second. Example: a step of 1 s that twice the links'
    rate makes 0.8 s: 25 % more.
    """
    plan = result.plan
    assert plan.prediction is not None
    rate = plan.global_batch / plan.prediction.step_s
    found = []
    for world in worlds:
        change = world.name.removeprefix("what if ")
        if world.step_s is None:
            found.append(Advice(change=change, sentence=f"{change} would not help: {world.note}"))
            continue
        gain = (world.global_batch or plan.global_batch) / world.step_s / rate - 1
        helps = gain >= _WORTH_IT
        words = "would help" if helps else "would not help"
        of = f" of {counted(world.global_batch, 'sample')}" if world.global_batch else ""
        sentence = f"{change} {words}: {gain:+.1%} samples/s, a step{of} takes {ms(world.step_s)}"
        found.append(Advice(change=change, gain=gain, step_s=world.step_s, helps=helps, sentence=sentence))
    return tuple(sorted(found, key=lambda a: -(a.gain if a.gain is not None else float("-inf"))))
