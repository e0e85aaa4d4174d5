"""The tally: sums over devices, and one row of each device, in one vector."""

import pytest

from evener.core.trace import CAUSES
from evener.runtime.ranks import Ranks
from evener.runtime.tally import HEALTHY, OUT_OF_MEMORY, Share, Tally
from tests.fakes import Rendezvous

DEVICES = ("lab/a", "lab/b", "lab/c")


def totals_of(shares: list[Share], names: tuple[str, ...] = ()):
    meeting = Rendezvous(len(shares))
    devices = DEVICES[: len(shares)]
    tallies = [Tally(Ranks(devices, d), meeting.wire(i), names) for i, d in enumerate(devices)]
    underway = [t.launch(7, share) for t, share in zip(tallies, shares, strict=True)]
    totals = [u.wait() for u in underway]
    assert meeting.launched == [["step 7, tally"]] * len(shares)
    assert all(t == totals[0] for t in totals[1:])
    return totals[0]


def test_sums_are_summed_and_rows_are_gathered_by_device():
    totals = totals_of(
        [
            Share(
                loss_sum=6.0,
                weight=3.0,
                computed_s=0.5,
                compute_s=0.4,
                samples=3,
                learning_rate=0.1,
                seconds_before={"wait": 2.0},
            ),
            Share(loss_sum=1.0, weight=1.0, computed_s=0.25, learning_rate=0.1, health=OUT_OF_MEMORY),
            Share(learning_rate=0.2, seconds_before={cause: float(i) for i, cause in enumerate(CAUSES)}),
        ]
    )
    assert (totals.loss_sum, totals.weight, totals.loss) == (7.0, 4.0, 1.75)
    assert totals.health == {"lab/a": HEALTHY, "lab/b": OUT_OF_MEMORY, "lab/c": HEALTHY}
    assert totals.computed_s == {"lab/a": 0.5, "lab/b": 0.25, "lab/c": 0.0}
    assert totals.compute_s == {"lab/a": 0.4, "lab/b": 0.0, "lab/c": 0.0}
    assert totals.samples == {"lab/a": 3, "lab/b": 0, "lab/c": 0}
    assert totals.learning_rate == {"lab/a": 0.1, "lab/b": 0.1, "lab/c": 0.2}
    assert totals.seconds_before["lab/a"] == {**dict.fromkeys(CAUSES, 0.0), "wait": 2.0}
    assert list(totals.seconds_before["lab/c"].values()) == list(range(len(CAUSES)))


def test_metrics_travel_as_sum_and_count_so_that_an_empty_device_is_no_nan():
    shares = [
        Share(metrics={"hits": (3.0, 4.0), "words": (10.0, 2.0)}),
        Share(metrics={"words": (5.0, 1.0)}),
    ]
    totals = totals_of(shares, ("hits", "words"))
    assert totals.metrics == {"hits": (3.0, 4.0), "words": (15.0, 3.0)}


def test_a_step_without_weight_has_loss_0():
    assert totals_of([Share(), Share()]).loss == 0.0


def test_a_device_alone():
    assert totals_of([Share(loss_sum=2.0, weight=4.0)]).loss == pytest.approx(0.5)
