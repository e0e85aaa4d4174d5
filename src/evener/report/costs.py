"""What training costs, as text and as JSON: sets of devices, cheapest, fastest, what each is worth."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from evener.core.fleet import Fleet
from evener.core.words import counted, in_time
from evener.cost.money import Rates
from evener.planner.offers import Limits, Offer, Offers, cheapest, fastest
from evener.planner.worth import Worth
from evener.report.tables import render, table

_FEW = 4


@dataclass(frozen=True, kw_only=True)
class CostAnswer:
    """All that was asked about the cost of a job; a sentence in place of a `Worth` says why there is none."""

    fleet: Fleet
    found: Offers
    rates: Rates
    limits: Limits
    tokens_per_sample: float | None = None
    kept: Sequence[Worth | str] = ()
    added: Sequence[Worth | str] = ()
    worlds: Sequence[tuple[str, Offers | str]] = ()
    notes: Sequence[str] = ()

    def text(self) -> str:
        """For a person: the sets that no other beats, the two answers, and what each device is worth."""
        return render(
            f"{len(self.found.sensible)} of {counted(len(self.found.offers), 'set')} of devices, the others "
            "are beaten in both speed and cost; fastest first",
            self._table(),
            *self._answers(self.found),
            *self._worth("Worth keeping?", self.kept),
            *self._worth("Worth adding?", self.added),
            *(line for change, found in self.worlds for line in self._world(change, found)),
            *(f"note: {n}" for n in (*self.notes, *_search_notes(self.found))),
        )

    def as_json(self) -> dict[str, Any]:
        """For a program; its keys are promised."""
        return {
            "currency": self.rates.currency,
            "per_hour": self.rates.devices,
            "power_per_hour": self.rates.power,
            "hosts_per_hour": self.rates.hosts,
            "offers": [self._one(o) for o in self.found.offers],
            "sensible": [self._one(o) for o in self.found.sensible],
            "sets": self.found.sets,
            "sets_of": self.found.of,
            "cheapest": self._one(cheapest(self.found.offers, self.limits)),
            "fastest": self._one(fastest(self.found.offers, self.limits)),
            "keep": [msgspec.to_builtins(x) for x in self.kept],
            "add": [msgspec.to_builtins(x) for x in self.added],
            "what_if": [self._world_object(change, found) for change, found in self.worlds],
            "notes": [*self.notes, *_search_notes(self.found)],
        }

    def _answers(self, found: Offers) -> list[str]:
        return [
            self._sentence(found, f"cheapest{_within(self.limits)}", cheapest(found.offers, self.limits)),
            self._sentence(found, f"fastest{self._for_money()}", fastest(found.offers, self.limits)),
        ]

    def _world(self, change: str, found: Offers | str) -> list[str]:
        if isinstance(found, str):
            return [f"What if {change}? {found}"]
        return [f"What if {change}?", *(f"  {line}" for line in self._answers(found))]

    def _world_object(self, change: str, found: Offers | str) -> dict[str, Any]:
        if isinstance(found, str):
            return {"change": change, "why_not": found}
        return {
            "change": change,
            "cheapest": self._one(cheapest(found.offers, self.limits)),
            "fastest": self._one(fastest(found.offers, self.limits)),
        }

    def _one(self, offer: Offer | None) -> dict[str, Any] | None:
        if offer is None:
            return None
        row = {f: getattr(offer, f) for f in offer.__struct_fields__}
        if self.tokens_per_sample:
            row["per_million_tokens"] = offer.per_million / self.tokens_per_sample
        if self.limits.samples:
            row["job_s"] = offer.seconds(self.limits.samples)
            row["job_money"] = offer.money(self.limits.samples)
        return row

    def _table(self) -> Any:
        unit = f" {self.rates.currency}" if self.rates.currency else ""
        tokens = self.tokens_per_sample
        header = ["devices", "samples/s", f"an hour{unit}", f"a million samples{unit}"]
        header += [f"a million tokens{unit}"] if tokens else []
        rows = []
        for o in self.found.sensible:
            numbers = [
                o.samples_per_s,
                o.per_hour,
                o.per_million,
                *([o.per_million / tokens] if tokens else []),
            ]
            rows.append([self._set(o.devices), *(f"{x:.4g}" for x in numbers)])
        return table(header, rows)

    def _sentence(self, found: Offers, question: str, offer: Offer | None) -> str:
        samples = self.limits.samples
        if offer is None:
            assert samples is not None
            quick, cheap = found.offers[0], cheapest(found.offers, Limits(samples=samples))
            assert cheap is not None
            takes, costs = in_time(quick.seconds(samples)), self.rates.money(cheap.money(samples))
            return f"{question}: no set does that; the fastest takes {takes}, the cheapest costs {costs}"
        whole = ""
        if samples:
            whole = f"; the job: {in_time(offer.seconds(samples))}, {self.rates.money(offer.money(samples))}"
        return (
            f"{question}: {self._set(offer.devices)}, {offer.samples_per_s:.4g} samples/s at "
            f"{self.rates.money(offer.per_million)} a million{whole}"
        )

    def _for_money(self) -> str:
        budget = self.limits.budget
        return "" if budget is None else f" for {self.rates.money(budget)} at most"

    def _set(self, names: Sequence[str]) -> str:
        """Devices in few words: their names, or how many of each kind on each host, or of each kind."""
        if len(names) <= _FEW:
            return ", ".join(names)
        known = {d.name: d.kind for d in self.fleet.devices}
        hosts = Counter((known.get(n, "new"), n.partition("/")[0]) for n in names)
        if len(hosts) <= _FEW:
            return ", ".join(f"{k} x {kind} on {host}" for (kind, host), k in hosts.items())
        return ", ".join(f"{k} x {kind}" for kind, k in Counter(known.get(n, "new") for n in names).items())

    def _worth(self, title: str, items: Sequence[Worth | str]) -> list[str]:
        lines = [f"  {x if isinstance(x, str) else x.sentence}" for x in items]
        return [title, *lines] if lines else []


def _within(limits: Limits) -> str:
    return "" if limits.deadline_s is None else f" within {in_time(limits.deadline_s)}"


def _search_notes(found: Offers) -> list[str]:
    notes = []
    if not found.complete:
        notes.append(
            f"{found.of} sets of devices are too many to try each: {found.sets} were planned, under rising "
            "price limits; cheapest and fastest are the best of those"
        )
    if found.misfits:
        notes.append(f"{counted(found.misfits, 'set')} of devices cannot run the job at all")
    gap = max(o.gap for o in found.offers)
    if gap:
        notes.append(f"plans are within {gap:.1%} of the fastest there may be, and so are their costs")
    return notes
