"""Last touches on a plan with owners: parts, samples and micro-batches are moved while that helps."""

from collections.abc import Iterator

from evener.cost.owned import play_owned
from evener.planner.owned_prices import WHOLE, Draft, OwnedPlan, OwnedPrices
from evener.planner.parts import filled, simple

FEW_DEVICES = 16
FEW_PRICED = 40
"""With more devices a price takes longer and single ones matter less: so many are asked for."""
_MOST_PRICED = 160
_SIMPLER = 0.0005  # small whole numbers may cost so much


def polished(prices: OwnedPrices, best: OwnedPlan) -> OwnedPlan:
    """Move parts, samples and micro-batches while that helps."""
    budget = _MOST_PRICED if len(prices.usable) <= FEW_DEVICES else FEW_PRICED
    improved = True
    while improved and budget > 0:
        improved = False
        for draft in _neighbours(prices, best):
            if draft not in prices.priced:
                budget -= 1
            found = prices.price(draft)
            if found is not None and found.value < best.value * (1 - 1e-6):
                best, improved = found, True
                break
            if budget <= 0:
                break
    return best


def _neighbours(prices: OwnedPrices, best: OwnedPlan) -> Iterator[Draft]:
    draft, names = best.draft, best.draft.names
    order = sorted(range(len(names)), key=lambda i: -best.cost.seconds[names[i]]["wait"])
    late = order[::-1][: 4 if len(names) > 6 else len(names)]
    early = order[: 4 if len(names) > 6 else len(names)]
    if prices.job.micro_batch is None:
        for i, (n, size) in enumerate(zip(draft.samples, draft.sizes, strict=True)):
            for other in sorted({size * 2, size + 1, size - 1, size // 2}, reverse=True):
                if n and 0 < other <= min(n, prices.largest_timed(names[i])):
                    yield _refilled(prices, draft, sizes=_set(draft.sizes, i, other))
    if prices.job.batch_per_device is None:
        for i in late:
            for j in early:
                for amount in sorted({max(1, draft.samples[i] // 8), 1}, reverse=True):
                    if i != j and draft.samples[i] - amount >= int(prices.job.keep_all):
                        yield from _moved(prices, draft, i, j, amount)
    for amount in (WHOLE // 8, WHOLE // 32, WHOLE // 128):
        for i in range(len(names)):
            for j in range(len(names)):
                if i != j and draft.parts[i] >= amount:
                    parts = _set(_set(draft.parts, i, draft.parts[i] - amount), j, draft.parts[j] + amount)
                    yield Draft(names, draft.samples, draft.sizes, parts)


def _moved(prices: OwnedPrices, draft: Draft, i: int, j: int, amount: int) -> Iterator[Draft]:
    """`amount` samples from device i to j, in as many micro-batches as before."""
    samples = _set(_set(draft.samples, i, draft.samples[i] - amount), j, draft.samples[j] + amount)
    sizes = draft.sizes
    for k in (i, j):
        rounds = -(-draft.samples[k] // draft.sizes[k]) if draft.sizes[k] else 1
        fixed = prices.job.micro_batch
        size = -(-samples[k] // rounds) if fixed is None else min(fixed, samples[k])
        if size > prices.largest_timed(draft.names[k]):
            return
        sizes = _set(sizes, k, size)
    yield _refilled(prices, Draft(draft.names, samples, sizes, draft.parts), sizes=sizes)


def _refilled(prices: OwnedPrices, draft: Draft, *, sizes: tuple[int, ...]) -> Draft:
    """The draft with other micro-batches, and parts as near to its own as memory then allows."""
    caps = prices.caps(draft.names, sizes)
    parts = draft.parts
    if any(part > cap for part, cap in zip(parts, caps, strict=True)):
        parts = filled(caps, [max(p, 1) for p in parts], WHOLE) or parts
    return Draft(draft.names, draft.samples, sizes, parts)


def simpler(prices: OwnedPrices, best: OwnedPlan) -> OwnedPlan:
    """The same in small whole numbers, where that costs next to nothing."""
    draft = best.draft
    caps = prices.caps(draft.names, draft.sizes)
    for parts in simple(draft.parts, caps, WHOLE):
        small = Draft(draft.names, draft.samples, draft.sizes, parts)
        plan = prices.plan_of(small)
        cost = play_owned(prices.model, plan)
        value = prices.aim.value(cost.step_s, plan.devices)
        fits = all(b <= prices.usable[n] for n, b in cost.memory_bytes.items())
        if fits and value <= best.value * (1 + _SIMPLER):
            return OwnedPlan(plan=plan, cost=cost, value=value, draft=small)
    return best


def _set(values: tuple[int, ...], at: int, value: int) -> tuple[int, ...]:
    return (*values[:at], value, *values[at + 1 :])
