"""Who may steal, what of a loader's stream is left out, and where stolen samples come from."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from evener.core.order import GlobalBatch
from evener.core.plan import Pipeline, Plan, Share, Stage
from evener.core.routes import Routes
from evener.errors import ReductionMismatchError, UsageError
from evener.runtime.batchnorm import replace_batchnorm
from evener.session.loop.feed import Feed, Samples
from evener.session.loop.stealing import MASKS, ORDER, STATISTICS, Stealing, check_stealing, stolen_parts

A, B = "lab/a", "lab/b"


def plan(*devices: str) -> Plan:
    """8 samples a device in micro-batches of 2."""
    pipelines = tuple(
        Pipeline(
            samples=8,
            micro_batch=2,
            stages=(Stage(layers=("all",), shares=(Share(devices=(d,), samples=2),)),),
        )
        for d in devices
    )
    return Plan(global_batch=8 * len(devices), pipelines=pipelines, steal=True)


def test_stealing_is_refused_where_others_could_not_run_a_micro_batch():
    check_stealing(plan(A, B), nn.Linear(2, 2), ())
    two = tuple(Stage(layers=(x,), shares=(Share(devices=(d,), samples=2),)) for x, d in (("x", A), ("y", B)))
    cut = Plan(global_batch=8, pipelines=(Pipeline(samples=8, micro_batch=2, stages=two),))
    with pytest.raises(UsageError, match="data-parallel plans"):
        check_stealing(cut, nn.Linear(2, 2), ())
    waves = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    replace_batchnorm(waves)
    with pytest.raises(UsageError, match="wave"):
        check_stealing(plan(A, B), waves, ())
    with pytest.raises(UsageError, match="tables in parts"):
        check_stealing(plan(A, B), nn.Linear(2, 2), ("users",))


def test_what_depends_on_who_ran_a_micro_batch_is_named():
    def parts(*layers: nn.Module, dropout: str = "per-device") -> tuple[str, ...]:
        return stolen_parts(SimpleNamespace(model=nn.Sequential(*layers), dropout=dropout))

    assert parts(nn.Linear(2, 2)) == (ORDER,)
    assert parts(nn.BatchNorm1d(2), nn.Dropout(0.1)) == (ORDER, STATISTICS, MASKS)
    assert parts(nn.Dropout(0.1), dropout="split-free") == (ORDER,)


class Counting(list):
    """A dataset that remembers which samples were read."""

    def __init__(self, size: int) -> None:
        super().__init__(torch.arange(size))
        self.read: list[int] = []

    def __getitem__(self, i):
        self.read.append(i)
        return super().__getitem__(i)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_feed_leaves_out_what_others_took(workers: int):
    dataset = Counting(16)
    samples = Samples(dataset=dataset, collate=torch.stack, shuffle=False, workers=workers)
    feed = Feed(samples, 16, lambda batch: [(0, 2), (2, 4), (4, 6), (6, 8)], samples_seen=0, pin=False)
    assert feed.next_batch().tolist() == [0, 1]
    feed.skip(2)
    assert feed.next_batch().tolist() == [6, 7]
    feed.skip(4)
    assert feed.next_batch().tolist() == [0, 1]  # of the second epoch, past the end of the first
    if not workers:
        assert dataset.read == [0, 1, 6, 7, 0, 1], "nothing is read in vain"
    feed.close()


def stealing(samples: Samples, store: dist.Store, here: str = B) -> Stealing:
    return Stealing(store, samples, here, lambda: 0.0)


@pytest.mark.parametrize("workers", [0, 1])
def test_own_samples_come_from_the_feed_and_taken_ones_from_the_dataset(workers: int):
    """a has drawn nothing yet; b, slow to predict, takes a's sixth and fourth sample pairs from the back."""
    dataset = Counting(16)
    samples = Samples(dataset=dataset, collate=torch.stack, shuffle=False, workers=workers)
    batch = GlobalBatch(epoch=0, start=0, stop=16)
    b, two = stealing(samples, dist.HashStore()), plan(A, B)
    feed = Feed(samples, 16, lambda _: [(8 + n, 10 + n) for n in (0, 2, 4, 6)], samples_seen=0, pin=False)
    draw = b.begin(two, Routes(two))
    fetch = b.fetch(draw, feed, batch)
    got = [fetch(x.stage, x.micro_batch).tolist() for x in draw.row() if x.type == "F"]
    # In no time at all everything of a that waits is worth taking, but for the one a keeps.
    assert got == [[8, 9], [10, 11], [12, 13], [4, 5], [2, 3], [0, 1], [14, 15]]
    assert draw.num_taken == 3 and draw.num_lost == 0
    b.close()
    feed.close()


def test_tickets_of_a_step_are_not_those_of_the_next_and_old_ones_are_deleted():
    store = dist.HashStore()
    samples = Samples(dataset=list(range(16)), collate=list, shuffle=False)
    b, two = stealing(samples, store), plan(A, B)
    for _ in range(3):
        draw = b.begin(two, Routes(two))
        assert sum(1 for x in draw.row() if x.type == "F") == 7
    assert store.check(["step3/lab/b/taken"]) and not store.check(["step2/lab/b/taken"])


def test_a_step_that_did_not_run_every_sample_once_is_an_error_and_the_rest_is_told():
    b, two = stealing(Samples(dataset=[0], collate=list), dist.HashStore()), plan(A, B)

    def after(a: int, other: int) -> None:
        totals = SimpleNamespace(samples={A: a, B: other})
        b.after_step(two, SimpleNamespace(samples=16, totals=totals))

    assert b.summary() == []
    after(6, 10)
    after(8, 8)
    assert b.summary() == ["stealing: samples run beyond those given, of 32: lab/a -2, lab/b +2"]
    with pytest.raises(ReductionMismatchError, match="every sample"):
        after(8, 10)
