"""Micro-batches drawn by ticket, devices played action by action: each sample once, whatever their pace."""

from collections import Counter as Tally

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.core.plan import Pipeline, Plan, Share, Stage
from evener.core.routes import Routes
from evener.runtime.stealing import Draw, lots_of


class Store:
    """Numbers that count up, as a store has them."""

    def __init__(self) -> None:
        self.numbers: Tally[str] = Tally()

    def add(self, key: str, amount: int) -> int:
        self.numbers[key] += amount
        return self.numbers[key]


def plan_of(samples: list[int], micro_batches: list[int]) -> Plan:
    pipelines = tuple(
        Pipeline(
            samples=n,
            micro_batch=m,
            stages=(Stage(layers=("all",), shares=(Share(devices=(f"h/{i}",), samples=m),)),),
        )
        for i, (n, m) in enumerate(zip(samples, micro_batches, strict=True))
    )
    return Plan(global_batch=sum(samples), pipelines=pipelines)


class Played:
    """A step of `plan` in which device i needs `sample_s[i]` seconds a sample (a forward takes none)."""

    def __init__(self, plan: Plan, sample_s: list[float], predicted_s: list[float] | None = None) -> None:
        names = [f"h/{i}" for i in range(len(sample_s))]
        self.clock = dict.fromkeys(names, 0.0)
        self.ran: dict[str, list[tuple[int, int]]] = {name: [] for name in names}
        self.ends: dict[str, float] = {}
        lots = lots_of(Routes(plan), dict(zip(names, predicted_s or sample_s, strict=True)))
        store = Store()
        self.draws = {n: Draw(lots, n, store, "step 0", lambda n=n: self.clock[n]) for n in names}
        rows = {name: draw.row() for name, draw in self.draws.items()}
        self.backwards = dict.fromkeys(names, 0)
        while rows:
            name = min(rows, key=lambda n: self.clock[n])
            action = next(rows[name], None)
            if action is None:
                self.ends[name] = self.clock[name]
                del rows[name]
            elif action.type == "B":
                draw = self.draws[name]
                first, stop = draw.range_of(action.stage, action.micro_batch)
                self.ran[name].append((first, stop))
                self.backwards[name] += 1
                is_last = self.backwards[name] == draw.num_backwards(action.stage, name)
                assert is_last == (action.micro_batch == len(draw.mine.sizes) - 1)
                self.clock[name] += (stop - first) * sample_s[names.index(name)]

    @property
    def samples(self) -> list[int]:
        return sorted(i for ran in self.ran.values() for first, stop in ran for i in range(first, stop))


cases = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 8), st.floats(0.01, 10), st.floats(0.01, 10)),
    min_size=1,
    max_size=5,
).filter(lambda rows: sum(row[0] for row in rows) > 0)


@given(cases)
def test_every_sample_is_run_once_and_the_last_backward_is_the_devices_own(rows):
    samples, micro_batches, sample_s, predicted_s = map(list, zip(*rows, strict=True))
    plan = plan_of(samples, micro_batches)
    played = Played(plan, sample_s, predicted_s)
    assert played.samples == list(range(plan.global_batch))


@given(cases)
def test_helping_costs_at_most_a_micro_batch_over_leaving_all_as_planned(rows):
    samples, micro_batches, sample_s, predicted_s = map(list, zip(*rows, strict=True))
    played = Played(plan_of(samples, micro_batches), sample_s, predicted_s)
    fixed_s = max(n * s for n, s in zip(samples, sample_s, strict=True))
    largest_s = max(micro_batches) * max(sample_s)
    assert max(played.ends.values()) <= fixed_s + largest_s + 1e-9


@pytest.mark.parametrize("slow", range(4))
@pytest.mark.parametrize("factor", [2, 3, 10])
def test_an_unforeseen_slow_down_costs_at_most_a_micro_batch_of_the_slow_device(slow: int, factor: int):
    """8 : 4 : 2 : 2 with 14 to 20 micro-batches each; best: 160 samples at the sum of all rates."""
    speeds = [8.0, 4.0, 2.0, 2.0]
    samples, micro_batches = [80, 40, 20, 20], [5, 3, 1, 1]
    true = [factor / s if i == slow else 1 / s for i, s in enumerate(speeds)]
    played = Played(plan_of(samples, micro_batches), true, [1 / s for s in speeds])
    best_s = 160 / sum(1 / t for t in true)
    step_s = max(played.ends.values())
    assert best_s <= step_s <= best_s + 2 * micro_batches[slow] * true[slow]
    assert step_s < max(n * t for n, t in zip(samples, true, strict=True))


def test_nothing_is_taken_where_all_go_as_planned():
    played = Played(plan_of([80, 40, 20, 20], [5, 3, 1, 1]), [1 / 8, 1 / 4, 1 / 2, 1 / 2])
    assert [draw.num_lost for draw in played.draws.values()] == [0] * 4
