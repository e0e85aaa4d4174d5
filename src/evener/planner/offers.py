"""Sets of devices as offers: what each takes and costs, the cheapest in time, the fastest for the money.

A set is offered with its fastest plan. That is enough: take the cheapest way within a deadline, and let U be
the devices it uses. The fastest plan over U takes no longer and uses no device that U lacks, so that it costs
no more. The same holds for the fastest way within a budget. So the best of all sets' fastest plans is the
best there is, as long as every set was tried.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence

from evener.core.figures import Value
from evener.core.fleet import Fleet
from evener.core.job import Job
from evener.core.profile import Profile
from evener.cost.money import Rates, per_million
from evener.errors import NoPlanFitsError, UsageError
from evener.planner.groups import groups_of
from evener.planner.result import PlanResult

MOST_SETS = 256
_STEPS = 16
Solve = Callable[[tuple[str, ...], float | None], PlanResult]
"""(devices, price per hour at most or None) → the fastest plan over them; NoPlanFitsError where none is."""


class Offer(Value, frozen=True, kw_only=True):
    """Devices that work together: seconds a step, samples per second, money per hour and per million samples.

    `gap` is how much faster a plan over them may at most be.
    """

    devices: tuple[str, ...]
    step_s: float
    samples_per_s: float
    per_hour: float
    per_million: float
    gap: float = 0.0

    def seconds(self, samples: float) -> float:
        """Seconds for so many samples."""
        return samples / self.samples_per_s

    def money(self, samples: float) -> float:
        """Money for so many samples."""
        return samples / 1e6 * self.per_million


class Offers(Value, frozen=True, kw_only=True):
    """All offers, fastest first. `sets` of the `of` sets of devices were tried, `misfits` had no plan."""

    offers: tuple[Offer, ...]
    sets: int
    of: int
    misfits: int = 0

    @property
    def complete(self) -> bool:
        return self.sets == self.of

    @property
    def sensible(self) -> tuple[Offer, ...]:
        """The offers that no other beats in speed without costing more a sample; fastest first."""
        kept: list[Offer] = []
        for offer in self.offers:
            if not kept or offer.per_million < kept[-1].per_million * (1 - 1e-12):
                kept.append(offer)
        return tuple(kept)


class Limits(Value, frozen=True, kw_only=True):
    """What the whole job of `samples` may take: seconds, money. UsageError for a limit without samples."""

    samples: float | None = None
    deadline_s: float | None = None
    budget: float | None = None

    def __post_init__(self) -> None:
        for option, value in (("--samples 5e6", self.samples), ("--budget 40", self.budget)):
            if value is not None and not 0 < value < float("inf"):
                raise UsageError(f"{option.split()[0]} is {value:g}", remedy=f"a number above 0: {option}")
        if self.samples is None and (self.deadline_s is not None or self.budget is not None):
            raise UsageError(
                "a deadline or a budget is of a whole job, and its size is not given",
                remedy="--samples 5e6 (samples of the dataset × epochs)",
            )


def offers(
    fleet: Fleet, profile: Profile, job: Job, rates: Rates, solve: Solve, *, most: int = MOST_SETS
) -> Offers:
    """What every set of unlike devices can do, for its price.

    Devices that are alike in kind, host, memory, links and price count by number. Where there are more than
    `most` sets, only those are tried that the planner picks under rising price limits, and each alone.
    NoPlanFitsError where no set has a plan.
    """
    alike = _alike(fleet, profile, job, rates)
    of = 1
    for names in alike:
        of *= len(names) + 1
    of -= 1
    sets: Iterator[tuple[tuple[str, ...], float | None]]
    sets = ((names, None) for names in _all_sets(alike)) if of <= most else _few_sets(alike, rates)
    found: dict[tuple[str, ...], Offer] = {}
    tried, misfits = 0, 0
    failure: NoPlanFitsError | None = None
    for names, limit in sets:
        tried += 1
        try:
            offer = offer_of(solve(names, limit), rates)
        except NoPlanFitsError as e:
            failure, misfits = e, misfits + 1
            continue
        key = tuple(sorted(offer.devices))
        if key not in found or offer.step_s < found[key].step_s:
            found[key] = offer
    if not found:
        assert failure is not None
        raise failure
    ordered = sorted(found.values(), key=lambda o: (-o.samples_per_s, o.per_million))
    return Offers(offers=tuple(ordered), sets=tried, of=of, misfits=misfits)


def offer_of(result: PlanResult, rates: Rates) -> Offer:
    """A plan's devices as an offer. Example: 100 samples/s for 1.80 an hour are 5.00 a million."""
    plan = result.plan
    assert plan.prediction is not None
    speed = plan.global_batch / plan.prediction.step_s
    per_hour = rates.per_hour(plan.devices)
    return Offer(
        devices=plan.devices,
        step_s=plan.prediction.step_s,
        samples_per_s=speed,
        per_hour=per_hour,
        per_million=per_million(per_hour, speed),
        gap=result.gap,
    )


def cheapest(found: Sequence[Offer], limits: Limits) -> Offer | None:
    """The offer of least money that ends within the deadline; None where all are late."""
    samples, most = limits.samples or 0.0, limits.deadline_s
    in_time = [o for o in found if most is None or o.seconds(samples) <= most * (1 + 1e-12)]
    return min(in_time, key=lambda o: (o.per_million, o.step_s), default=None)


def fastest(found: Sequence[Offer], limits: Limits) -> Offer | None:
    """The fastest offer whose money for the job is within the budget; None where all cost more."""
    samples, most = limits.samples or 0.0, limits.budget
    paid = [o for o in found if most is None or o.money(samples) <= most * (1 + 1e-12)]
    return min(paid, key=lambda o: (o.step_s, o.per_million), default=None)


def _alike(fleet: Fleet, profile: Profile, job: Job, rates: Rates) -> list[tuple[str, ...]]:
    """Devices that are the same to the planner and to the purse."""
    kept: dict[tuple, list[str]] = {}
    for number, group in enumerate(groups_of(fleet, profile, job)):
        for name in group.names:
            kept.setdefault((number, rates.devices[name]), []).append(name)
    return [tuple(names) for names in kept.values()]


def _all_sets(alike: Sequence[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    for counts in itertools.product(*(range(len(names) + 1) for names in alike)):
        if any(counts):
            yield tuple(n for names, k in zip(alike, counts, strict=True) for n in names[:k])


def _few_sets(
    alike: Sequence[tuple[str, ...]], rates: Rates
) -> Iterator[tuple[tuple[str, ...], float | None]]:
    """Every device alone, and all of them under price limits from a sixteenth of what they cost upwards."""
    everyone = tuple(n for names in alike for n in names)
    for names in alike:
        yield names[:1], None
    whole = sum(rates.devices.values())
    for step in range(1, _STEPS):
        yield everyone, whole * step / _STEPS
    yield everyone, None
