"""Is a device worth having? What it adds in speed, what it adds in cost, and when a bought one has paid."""

from evener.core.figures import Value
from evener.cost.money import Rates, payback_hours, per_million, saved_per_hour
from evener.planner.offers import Offer

_SLIGHT = 0.001


class Worth(Value, frozen=True, kw_only=True):
    """A fleet with a device beside the same fleet without it.

    `gain` is in samples per second (0.1 is a tenth more), `extra_per_hour` what an hour costs more,
    `extra_per_million` what a million samples cost more (less where negative). `saved_per_hour` is what an
    hour of training with it saves (`evener.cost.money`); `payback_hours` follows from `buy`.
    """

    device: str
    without: Offer
    with_it: Offer
    gain: float
    extra_per_hour: float
    extra_per_million: float
    saved_per_hour: float
    buy: float | None = None
    payback_hours: float | None = None
    worth: bool
    sentence: str


def worth_of(
    device: str,
    without: Offer,
    with_it: Offer,
    rates: Rates,
    *,
    buy: float | None = None,
    waiting_per_hour: float = 0.0,
) -> Worth:
    """What `device` is worth: the offers of the fleet without and with it decide.

    `waiting_per_hour` is what an hour of waiting for the job costs its user: it counts on both sides. Worth
    is what lowers the cost of a million samples, or keeps it while the job gets faster; what is bought must
    save something, and the hours after which that is its price are told.
    Example: 100 samples/s for 2.00 an hour become 125 for 2.06; the card costs 220: 0.44 saved an hour, paid
    back after 500 hours.
    """
    gain = with_it.samples_per_s / without.samples_per_s - 1
    before, after = (o.per_hour + waiting_per_hour for o in (without, with_it))
    saved = saved_per_hour(before, without.samples_per_s, after, with_it.samples_per_s)
    extra_million = per_million(after, with_it.samples_per_s) - per_million(before, without.samples_per_s)
    hours = payback_hours(buy, saved) if buy is not None else None
    helps = gain > _SLIGHT and (saved > 0 if buy else saved >= -1e-12 * before)
    return Worth(
        device=device,
        without=without,
        with_it=with_it,
        gain=gain,
        extra_per_hour=after - before,
        extra_per_million=extra_million,
        saved_per_hour=saved,
        buy=buy,
        payback_hours=hours,
        worth=helps,
        sentence=_sentence(device, gain, after - before, extra_million, rates, buy, hours, saved),
    )


def _sentence(
    device: str,
    gain: float,
    extra_hour: float,
    extra_million: float,
    rates: Rates,
    buy: float | None,
    hours: float | None,
    saved: float,
) -> str:
    if gain <= _SLIGHT:
        return f"{device}: no faster with it ({gain:+.1%} samples/s): not worth having for this job"
    said = (
        f"{device}: {gain:+.1%} samples/s for {rates.money(extra_hour)} an hour more; a million samples cost "
        f"{rates.money(abs(extra_million))} {'more' if extra_million > 0 else 'less'}"
    )
    if buy is None:
        return said
    if hours is None:
        return (
            f"{said}; its price of {rates.money(buy)} is never paid back: an hour with it costs "
            f"{rates.money(-saved)} more than its work is worth at the present cost of a sample"
        )
    return (
        f"{said}; its price of {rates.money(buy)} is paid back after {_number(hours)} hours of training "
        f"({rates.money(saved)} saved an hour)"
    )


def _number(value: float) -> str:
    """Example: "1,390", "4.2"."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
