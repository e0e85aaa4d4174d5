"""Cheapest and fastest sets of devices against enumeration of every set and every split of the batch."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evener.core.figures import Curve, Figure
from evener.core.fleet import Device, Fleet, Link
from evener.core.job import Job
from evener.core.profile import Layer, Profile, StepTiming
from evener.cost.money import Rates
from evener.planner import plan
from evener.planner.offers import Limits, cheapest, fastest, offers


def figure(value):
    return Figure(value=float(value), source="measured")


@st.composite
def cases(draw):
    """Devices of whole seconds a sample and whole cents an hour, on one or two hosts that cost as well."""
    kinds = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    count = draw(st.integers(1, 4))
    batch = draw(st.integers(1, 7))
    names = [f"{draw(st.sampled_from('ab'))}/{i}" for i in range(count)]
    of = [draw(st.integers(0, len(kinds) - 1)) for _ in names]
    hop_s = draw(st.integers(0, 20)) / 10 + 0.01  # so that no set is late by a rounding error
    prices = {n: draw(st.integers(0, 9)) / 100 for n in names}
    hosts = {h: draw(st.integers(0, 9)) / 100 for h in "ab"}
    deadline = draw(st.integers(1, 60))
    budget = draw(st.integers(1, 60))
    return kinds, names, of, batch, hop_s, prices, hosts, deadline, budget


def built(kinds, names, of, hop_s):
    devices = tuple(
        Device(name=n, kind=str(k), memory_bytes=figure(1e9)) for n, k in zip(names, of, strict=True)
    )
    curve = Curve(points=((0.0, hop_s),), source="measured")
    hosts = sorted({d.host for d in devices})
    links = tuple(Link(a=a, b=b, curve=curve) for a, b in itertools.combinations_with_replacement(hosts, 2))
    steps = tuple(
        StepTiming(kind=str(i), micro_batch=b, forward_s=figure(s * b / 3), backward_s=figure(s * b * 2 / 3))
        for i, s in enumerate(kinds)
        for b in (1, 8)
    )
    layer = Layer(name="all", num_params=1, param_bytes=4, flops_per_sample=1.0)
    return Fleet(devices=devices, links=links), Profile(model="m", layers=(layer,), steps=steps)


def every_way(kinds, names, of, batch, hop_s, prices, hosts):
    """(seconds, money, devices) of every split of the batch over every set: slowest device, then the sum.

    A ring over n devices takes 2 (n - 1) hops, each of `hop_s` whatever it carries; groups by host,
    which take other hops, are not asked for.
    """
    for split in itertools.product(range(batch + 1), repeat=len(names)):
        if sum(split) == batch:
            used = [i for i, k in enumerate(split) if k]
            seconds = max(split[i] * kinds[of[i]] for i in used) + 2 * (len(used) - 1) * hop_s
            an_hour = sum(prices[names[i]] for i in used) + sum(hosts[h] for h in {names[i][0] for i in used})
            yield seconds, seconds * an_hour / 3600, tuple(names[i] for i in used)


@settings(max_examples=150)
@given(cases())
def test_cheapest_and_fastest_equal_exhaustive_search(case):
    kinds, names, of, batch, hop_s, prices, hosts, deadline, budget_cents = case
    fleet, profile = built(kinds, names, of, hop_s)
    job = Job(global_batch=batch, memory_margin=0.0, sums="ring")
    rates = Rates(devices=prices, hosts=hosts)

    def solve(chosen, limit):
        assert limit is None
        return plan(fleet.only(chosen), profile, job)

    found = offers(fleet, profile, job, rates, solve)
    assert found.complete
    ways = list(every_way(kinds, names, of, batch, hop_s, prices, hosts))
    budget = budget_cents * 1e-4
    limits = Limits(samples=float(batch), deadline_s=float(deadline), budget=budget)

    in_time = [money for seconds, money, _ in ways if seconds <= deadline * (1 + 1e-9)]
    cheap = cheapest(found.offers, limits)
    assert (cheap is None) == (not in_time)
    if cheap is not None:
        assert cheap.money(batch) == pytest.approx(min(in_time), abs=1e-15)
        assert cheap.seconds(batch) <= deadline * (1 + 1e-9)

    paid = [seconds for seconds, money, _ in ways if money <= budget * (1 + 1e-9)]
    quick = fastest(found.offers, limits)
    assert (quick is None) == (not paid)
    if quick is not None:
        assert quick.seconds(batch) == pytest.approx(min(paid))
        assert quick.money(batch) <= budget * (1 + 1e-9)

    for offer in found.offers:  # each is a way that there is, at its price
        same = [(s, m) for s, m, used in ways if sorted(used) == sorted(offer.devices)]
        assert any(
            s == pytest.approx(offer.step_s) and m == pytest.approx(offer.money(batch), abs=1e-15)
            for s, m in same
        )


@settings(max_examples=40)
@given(cases())
def test_no_offer_that_is_shown_is_beaten_by_another(case):
    kinds, names, of, batch, hop_s, prices, hosts, _, _ = case
    fleet, profile = built(kinds, names, of, hop_s)
    job = Job(global_batch=batch, memory_margin=0.0)
    rates = Rates(devices=prices, hosts=hosts)
    found = offers(fleet, profile, job, rates, lambda c, _: plan(fleet.only(c), profile, job))
    for shown in found.sensible:
        assert not [
            o
            for o in found.offers
            if o.samples_per_s > shown.samples_per_s * (1 + 1e-9)
            and o.per_million < shown.per_million * (1 - 1e-9)
        ]
    left = [o for o in found.offers if o not in found.sensible]
    for o in left:
        assert any(
            s.samples_per_s >= o.samples_per_s and s.per_million <= o.per_million * (1 + 1e-9)
            for s in found.sensible
        )
