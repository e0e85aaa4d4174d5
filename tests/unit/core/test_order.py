"""K20: which samples come when depends on samples seen alone, never on how many devices there are."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.core.order import (
    batches_in,
    epoch_order,
    global_batch_at,
    positions,
    resized,
    samples_by_pipeline,
)
from evener.core.plan import Pipeline, Plan, Share, Stage
from evener.core.routes import Routes


def plan_of(samples: tuple[int, ...], micro_batch: int = 4) -> Plan:
    return Plan(
        global_batch=sum(samples),
        pipelines=tuple(
            Pipeline(
                samples=n,
                micro_batch=micro_batch,
                stages=(Stage(layers=("all",), shares=(Share(devices=(f"lab/{i}",), samples=micro_batch),)),),
            )
            for i, n in enumerate(samples)
        ),
    )


def taken(plan: Plan, samples: int) -> list[list[int]]:
    """Positions of a global batch of `samples` that each device takes, device by device."""
    routes = Routes(resized(plan, samples))
    return [
        [
            position
            for m in range(routes.num_micro_batches(stage))
            for position in range(*positions(routes, stage, f"lab/{stage}", m))
        ]
        for stage in range(len(plan.pipelines))
    ]


def test_ten_samples_by_5_3_2_are_disjoint_and_complete():
    assert taken(plan_of((5, 3, 2)), 10) == [[0, 1, 2, 3, 4], [5, 6, 7], [8, 9]]


def test_sixteen_on_three_equal_devices_is_6_5_5():
    assert samples_by_pipeline(plan_of((1, 1, 1)), 16) == (6, 5, 5)


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(any).map(tuple), st.integers(1, 5), st.data()
)
def test_every_position_once_for_any_shares_and_any_last_batch(shares, micro_batch, data):
    plan = plan_of(shares, micro_batch)
    samples = data.draw(st.integers(1, plan.global_batch))
    assert sorted(itertools.chain(*taken(plan, samples))) == list(range(samples))


@given(st.integers(1, 40), st.integers(1, 12))
def test_an_epoch_holds_every_sample_once_and_no_batch_crosses_it(dataset_size, global_batch):
    seen, positions_seen = 0, []
    while seen < dataset_size:
        batch = global_batch_at(seen, dataset_size, global_batch)
        assert batch.epoch == 0
        positions_seen += range(batch.start, batch.stop)
        seen += batch.samples
    assert positions_seen == list(range(dataset_size))
    order = epoch_order(dataset_size, 0, seed=3)
    assert sorted(order.tolist()) == list(range(dataset_size))


def test_the_order_is_a_function_of_seed_and_epoch():
    assert epoch_order(50, 1, seed=3).tolist() == epoch_order(50, 1, seed=3).tolist()
    assert epoch_order(50, 1, seed=3).tolist() != epoch_order(50, 2, seed=3).tolist()
    assert epoch_order(5, 1, seed=3, shuffle=False).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("samples", "expected"), [(4, 1), (8, 2), (9, 3), (10, 3), (20, 6), (24, 7), (30, 9)]
)
def test_the_short_last_batch_of_an_epoch_counts(samples: int, expected: int) -> None:
    """Steps were counted as samples / batch, and a run of 12 steps showed "step 12/11"."""
    assert batches_in(samples, 10, 4) == expected
    seen = steps = 0
    while seen < samples:
        seen += global_batch_at(seen, 10, 4).samples
        steps += 1
    assert steps == expected
