"""What makes one plan better than another: seconds a step, or money a step, within the job's limits."""

from collections.abc import Iterable
from dataclasses import dataclass

from evener.core.fleet import Fleet
from evener.core.job import Job
from evener.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Aim:
    """Prices in money per hour by device; empty when no wish of the job needs them."""

    prices: dict[str, float]
    by_money: bool = False
    max_step_s: float | None = None
    max_price_per_hour: float | None = None

    def allowed(self, names: Iterable[str]) -> bool:
        """Whether these devices together stay within the price limit."""
        if self.max_price_per_hour is None:
            return True
        return self.per_hour(names) <= self.max_price_per_hour * (1 + 1e-12)

    def per_hour(self, names: Iterable[str]) -> float:
        """What an hour of these devices costs. Example: 2 devices of 1.80: 3.60."""
        return sum(self.prices[n] for n in names)

    def weight(self, names: Iterable[str]) -> float:
        """What a second costs: 1, or the price of the devices. Example: 2 devices of 1.80 an hour: 0.001."""
        return self.per_hour(names) / 3600 if self.by_money else 1.0

    def value(self, step_s: float, names: Iterable[str]) -> float:
        """The number to make small; infinite where a limit is broken."""
        held = tuple(names)
        late = self.by_money and self.max_step_s is not None and step_s > self.max_step_s
        return float("inf") if late or not self.allowed(held) else step_s * self.weight(held)


def aim_of(fleet: Fleet, job: Job) -> Aim:
    """The job's aim. UsageError when a price is needed that the fleet does not give."""
    by_money = job.objective == "money"
    if not by_money and job.max_price_per_hour is None:
        return Aim(prices={}, max_step_s=job.max_step_s)
    without = [d.name for d in fleet.devices if d.price_per_hour is None]
    if without:
        raise UsageError(
            f"no price is known of {', '.join(without[:5])}",
            remedy="price_per_hour of every device in the fleet file, or no wish about money",
        )
    return Aim(
        prices={d.name: d.price_per_hour.value for d in fleet.devices if d.price_per_hour},
        by_money=by_money,
        max_step_s=job.max_step_s,
        max_price_per_hour=job.max_price_per_hour,
    )
