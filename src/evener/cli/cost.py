"""`evener cost`: what training costs on every set of devices, and whether a device is worth its price.

Never imports torch.
"""

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace as replaced
from pathlib import Path
from typing import Annotated, Any

import typer
from msgspec.structs import replace

from evener.cli.options import (
    Allow,
    AsJson,
    Batch,
    FleetFile,
    MemoryMargin,
    Model,
    ModelPrecision,
    ProfileFile,
    ShapesWanted,
)
from evener.cli.plan import job_from, solved, world_of
from evener.core.catalogue import read_fleet
from evener.core.figures import Figure
from evener.core.files import read
from evener.core.fleet import Fleet
from evener.core.job import Job, Shapes
from evener.core.prices import Price, PriceList
from evener.cost.money import Rates, rates_of, unused
from evener.errors import NoPlanFitsError, UsageError
from evener.planner import PlanResult
from evener.planner.offers import Limits, Offer, Offers, offer_of, offers
from evener.planner.what_if import World, changed
from evener.planner.worth import Worth, worth_of
from evener.report.costs import CostAnswer

MOST_KEPT = 8
"""With more kinds on more hosts than that, one device of each kind is looked at, whatever its host."""
_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def cost(
    fleet: FleetFile,
    profile: ProfileFile = None,
    batch: Batch = None,
    model: Model = None,
    precision: ModelPrecision = "float32",
    prices: Annotated[
        Path | None, typer.Option(help="Prices file: rent, watts, what one costs to buy; price of a kWh.")
    ] = None,
    price: Annotated[
        list[str] | None, typer.Option(help="Rent of an hour: lab1/gpu0=0.79, or KIND=0.79. May be repeated.")
    ] = None,
    watts: Annotated[
        list[str] | None, typer.Option(help="What it draws: NAME=170, a device, kind or host.")
    ] = None,
    buy: Annotated[
        list[str] | None, typer.Option(help="What one costs to buy, used or new: KIND=210, for --add.")
    ] = None,
    per_kwh: Annotated[float | None, typer.Option(help="Price of a kilowatt hour.")] = None,
    stand_in: Annotated[
        bool, typer.Option("--stand-in", help="Take rents nobody gave from a dated table, and say so.")
    ] = False,
    samples: Annotated[
        float | None, typer.Option(help="Samples of the whole job, for --deadline and --budget: 5e6.")
    ] = None,
    deadline: Annotated[
        str | None, typer.Option(help="The cheapest devices that end in this time: 90m, 12h, 3d.")
    ] = None,
    budget: Annotated[
        float | None, typer.Option(help="The fastest devices that cost no more, for the whole job.")
    ] = None,
    tokens_per_sample: Annotated[
        float | None,
        typer.Option(min=1, max=1e12, help="Also give the cost of a million tokens; --model knows it."),
    ] = None,
    add: Annotated[
        list[str] | None,
        typer.Option(help="Is it worth adding: KIND, or KIND HOST. May be repeated."),
    ] = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option(help="The same in a changed fleet: 'split lab1/gpu0 3g.20gb 3g.20gb', 'drop NAME'."),
    ] = None,
    waiting: Annotated[
        float,
        typer.Option(
            min=0, max=1e9, help="What an hour of waiting for the job costs you, beside the devices."
        ),
    ] = 0.0,
    memory_margin: MemoryMargin = 0.1,
    shapes: ShapesWanted = "auto",
    allow: Allow = None,
    as_json: AsJson = False,
) -> None:
    """Tell what training costs on every sensible set of devices, and what a device is worth.

    Cost is rent and power by the hour over samples by the second. Lists the sets that no other beats in both,
    the cheapest within a deadline, the fastest within a budget, and for each device (and each that might be
    added) the extra speed, the extra cost and the hours after which its price is paid back.
    """
    devices = read_fleet(fleet)
    job = job_from(devices, batch, None, memory_margin=memory_margin, allow=tuple(allow or ()))
    asked = _Asked(
        world=world_of(devices, profile, model, precision, job),
        job=job,
        shapes=shapes,
        prices=price_list(prices, price, watts, buy, per_kwh),
        stand_in=stand_in,
        waiting=waiting,
    )
    limits = Limits(samples=samples, deadline_s=seconds_of(deadline) if deadline else None, budget=budget)
    rates = asked.rates(devices)
    found = offers(devices, asked.world.profile, job, rates, asked.solver(rates, devices))
    answer = CostAnswer(
        fleet=devices,
        found=found,
        rates=rates,
        limits=limits,
        tokens_per_sample=tokens_per_sample or _tokens_of(model),
        kept=_kept(asked, rates),
        added=[_added(asked, a) for a in add or []],
        worlds=[(change, _in_world(asked, rates, change)) for change in what_if or []],
        notes=(*rates.notes, *_unused(asked, add or []), *_waiting_note(waiting, rates)),
    )
    print(answer.text(), end="", file=sys.stderr if as_json else sys.stdout)
    if as_json:
        print(json.dumps(answer.as_json()))


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """A job on a fleet, and what the fleet costs."""

    world: World
    job: Job
    shapes: Shapes
    prices: PriceList
    stand_in: bool
    waiting: float

    def rates(self, fleet: Fleet, owned: Sequence[str] = ()) -> Rates:
        return rates_of(fleet, self.prices, stand_in=self.stand_in, owned=owned)

    def solver(self, rates: Rates, fleet: Fleet):
        """The fastest plan over some of the devices of `fleet`, within a price an hour where one is given."""
        priced = _priced(fleet, rates)

        def solve(names: tuple[str, ...], limit: float | None) -> PlanResult:
            job = self.job if limit is None else replace(self.job, max_price_per_hour=limit)
            world = World(fleet=priced.only(names), profile=self.world.profile)
            return solved(world, job, self.shapes)

        return solve


def _priced(fleet: Fleet, rates: Rates) -> Fleet:
    """The fleet with what each device costs an hour; a price of 0 is no figure, so it is next to nothing."""
    prices = {name: Figure(value=max(rate, 1e-9), source="assumed") for name, rate in rates.devices.items()}
    devices = tuple(replace(d, price_per_hour=prices[d.name]) for d in fleet.devices)
    return replace(fleet, devices=devices)


def _in_world(asked: _Asked, rates: Rates, change: str) -> Offers | str:
    """What the sets of a changed fleet cost; slices share the price of their card, copies have the same."""
    world = changed(replaced(asked.world, fleet=_priced(asked.world.fleet, rates)), change)
    fleet = world.fleet
    new = [d.name for d in fleet.devices if d.price_per_hour is None]
    found = asked.rates(fleet.only(tuple(new))).devices if new else {}
    known = {d.name: d.price_per_hour.value for d in fleet.devices if d.price_per_hour}
    changed_rates = replaced(rates, devices={**known, **found})
    wider = replaced(asked, world=world)
    solve = wider.solver(changed_rates, fleet)
    try:
        return offers(fleet, world.profile, asked.job, changed_rates, solve)
    except NoPlanFitsError as e:
        return e.what


def price_list(
    path: Path | None,
    rents: Sequence[str] | None,
    watts: Sequence[str] | None,
    buys: Sequence[str] | None,
    per_kwh: float | None,
) -> PriceList:
    """The prices of the command line, then those of the file. UsageError for what is no NAME=AMOUNT."""
    listed = read(path, PriceList) if path else PriceList()
    given = [Price(name=n, per_hour=x) for n, x in map(_named, rents or ())]
    given += [Price(name=n, watts=x) for n, x in map(_named, watts or ())]
    given += [Price(name=n, buy=x) for n, x in map(_named, buys or ())]
    kwh = listed.per_kwh if per_kwh is None else per_kwh
    try:
        return replace(listed, prices=(*given, *listed.prices), per_kwh=kwh)
    except ValueError as e:
        raise UsageError(str(e), remedy="--per-kwh 0.30") from e


def _named(word: str) -> tuple[str, float]:
    name, equals, amount = word.rpartition("=")
    try:
        value = float(amount)
    except ValueError:
        value = -1.0
    if not (equals and name.strip()) or not 0 <= value < float("inf"):
        raise UsageError(f"cannot read {word!r}", remedy="NAME=AMOUNT: lab1/gpu0=0.79 or 'RTX 3060=210'")
    return name.strip(), value


def seconds_of(text: str) -> float:
    """Seconds from "90m", "12h", "3d" or "45s". UsageError for another spelling."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smhd])\s*", text)
    if not match or float(match[1]) == 0:
        raise UsageError(f"cannot read the time {text!r}", remedy="90m, 12h or 3d")
    return float(match[1]) * _UNITS_S[match[2]]


def _tokens_of(model: str | None) -> float | None:
    if model is None:
        return None
    from evener.core.transformer import transformer

    return transformer(model).sequence


def _kept(asked: _Asked, rates: Rates) -> list[Worth | str]:
    """What each device of the fleet is worth to it; one of several that are alike stands for them."""
    fleet = asked.world.fleet
    if len(fleet.devices) < 2:
        return []
    solve, names = asked.solver(rates, fleet), tuple(d.name for d in fleet.devices)
    everything = offer_of(solve(names, None), rates)
    # the last of those that are alike: the planner takes the first ones
    by_host = {(d.kind, d.host, rates.devices[d.name]): d.name for d in fleet.devices}
    by_kind = {(d.kind, rates.devices[d.name]): d.name for d in fleet.devices}
    alike: dict[Any, str] = by_host if len(by_host) <= MOST_KEPT else by_kind
    return [_worth(asked, name, names, everything, rates) for name in alike.values()]


def _worth(
    asked: _Asked,
    name: str,
    names: tuple[str, ...],
    everything: Offer,
    rates: Rates,
    buy: float | None = None,
) -> Worth | str:
    rest = tuple(n for n in names if n != name)
    fleet = asked.world.fleet
    try:
        without = offer_of(asked.solver(rates, fleet)(rest, None), rates)
    except NoPlanFitsError as e:
        return f"{name}: without it {e.what}"
    return worth_of(name, without, everything, rates, buy=buy, waiting_per_hour=asked.waiting)


def _added(asked: _Asked, change: str) -> Worth | str:
    """What a device that the fleet does not have would be worth."""
    world = changed(asked.world, f"add {change}")
    new = world.fleet.devices[-1]
    entry = asked.prices.of(new.name, new.kind)
    buy = entry.buy if entry else None
    rates = asked.rates(world.fleet, owned=() if buy is None else (new.name,))
    wider, names = replaced(asked, world=world), tuple(d.name for d in world.fleet.devices)
    everything = offer_of(wider.solver(rates, world.fleet)(names, None), rates)
    return _worth(wider, new.name, names, everything, rates, buy)


def _waiting_note(waiting: float, rates: Rates) -> tuple[str, ...]:
    said = f"what devices are worth counts {rates.money(waiting)} for an hour of waiting; the sets do not"
    return (said,) if waiting else ()


def _unused(asked: _Asked, add: Sequence[str]) -> tuple[str, ...]:
    world = asked.world
    for change in add:
        world = changed(world, f"add {change}")
    return unused(world.fleet, asked.prices)
