"""Why a data-parallel plan is as it is: who is left out, what limits, what was assumed, what else there
is.
"""

from evener.core.collectives import ring
from evener.core.job import Job
from evener.core.plan import LeftOut, Prediction
from evener.core.split import apportion
from evener.planner.groups import Group, ms
from evener.planner.result import Alternative
from evener.planner.subsets import Pool, Split


def left_out(pool: Pool, job: Job, groups: tuple[Group, ...], split: Split) -> tuple[LeftOut, ...]:
    """Each device without samples, and the sentence why."""
    reasons: dict[str, str] = {n: g.refusal for g in groups for n in g.names if not g.cap}
    base = pool.counts_of(split.samples)
    for g, group in enumerate(pool.groups):
        idle = [n for n in group.names if n not in split.samples]
        if idle and job.batch_per_device is not None:
            reasons.update(dict.fromkeys(idle, "batch_per_device gives it no sample"))
        elif idle and len(split.samples) >= job.global_batch:
            words = f"the global batch has {job.global_batch} samples and faster devices take them"
            reasons.update(dict.fromkeys(idle, words))
        elif idle:
            more = (*base[:g], base[g] + 1, *base[g + 1 :])
            reasons.update(dict.fromkeys(idle, _slower(pool.split(more, least=1), split)))
    return tuple(
        LeftOut(device=d.name, reason=reasons[d.name]) for d in pool.fleet.devices if d.name in reasons
    )


def _slower(with_it: Split | None, split: Split) -> str:
    if with_it is None:
        return "it cannot take a share of this batch"
    return f"with it a step takes {ms(with_it.step_s)}, without it {ms(split.step_s)}"


def limiter(prediction: Prediction) -> str:
    """The sentence what the step of the device that waits for nobody is made of."""
    name = min(prediction.seconds, key=lambda n: prediction.seconds[n]["wait"])
    causes = prediction.seconds[name]
    cause = max(causes, key=lambda c: causes[c])
    what = {
        "compute": f"{name} computes for",
        "reduce": "the gradient reduction shows for",
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
            said.append(f"{group.names[0]} takes at most {load.cap} samples, not {job.micro_batch} at once")
    return tuple(dict.fromkeys(said))


def alternatives(pool: Pool, prediction: Prediction, job: Job) -> tuple[Alternative, ...]:
    """The best single device, the even split and the split by solo speed, with their predicted seconds."""
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
            )
        )
    for label, weights in (
        ("even split", [1.0] * len(names)),
        ("share by speed", [solo.get(n, 0.0) for n in names]),
    ):
        if len(names) > 1 and any(weights):
            parts = dict(zip(names, apportion(job.global_batch, weights), strict=True))
            fixed = pool.fixed({n: k for n, k in parts.items() if k})
            note = "" if fixed else "does not fit"
            found.append(
                Alternative(name=label, step_s=fixed.step_s if fixed else None, samples=parts, note=note)
            )
    return tuple(found)
