import pytest

from evener.core.membership import Ballot, ScaleState, Snapshot, Standing
from evener.errors import StateLostError
from evener.policy.settle import moves, settle

NAMES = ("w", "b")


def standing(device: str, step: int, **more) -> Standing:
    return Standing(device=device, step=step, samples_seen=step * 8, **({"holds": NAMES} | more))


def ballot(step: int) -> Ballot:
    return Ballot(step=step, tally=(1.0, 2.0))


def test_without_a_ballot_of_the_step_in_flight_it_is_taken_anew():
    told = settle(
        [standing("a", 7, ballot=ballot(6), is_summed=True), standing("b", 7, ballot=ballot(6))], NAMES
    )
    assert (told.step, told.samples_seen, told.ballot, told.rewind) == (7, 56, None, False)
    assert told.reason == "nothing of step 7 was applied"


def test_one_ballot_is_enough_to_conclude_the_step_for_all():
    told = settle([standing("a", 8, ballot=ballot(7)), standing("b", 7, is_summed=True)], NAMES)
    assert (told.step, told.ballot) == (8, ballot(7))
    assert told.holders == {"w": ("a", "b"), "b": ("a", "b")}


def test_a_device_that_lacks_sums_it_should_have_is_refused():
    with pytest.raises(StateLostError, match="b is at step 7 while a would take step 8"):
        settle([standing("a", 8, ballot=ballot(7)), standing("b", 7, holds=("w",))], NAMES)


def test_a_ballot_of_a_step_that_its_holder_did_not_apply_concludes_nothing():
    """Story: out of memory is agreed on by a ballot too, and such a step is redone by all."""
    told = settle([standing("a", 7, ballot=ballot(7)), standing("b", 7, is_summed=True)], NAMES)
    assert (told.step, told.ballot) == (7, None)


def test_what_only_the_lost_held_comes_from_the_newest_complete_snapshot():
    def snaps(*names_at: tuple[int, tuple[str, ...]]):
        return tuple(Snapshot(step=k, samples_seen=8 * k, names=n) for k, n in names_at)

    a = standing("a", 9, holds=("w",), snapshots=snaps((4, ("w", "b")), (8, ("w",))))
    told = settle([a], NAMES)
    assert (told.step, told.samples_seen, told.rewind) == (4, 32, True)
    assert told.holders == {"w": ("a",), "b": ("a",)}
    assert "5 steps are taken anew" in told.reason
    with pytest.raises(StateLostError, match="only lost devices held b"):
        settle([standing("a", 9, holds=("w",))], NAMES)


def test_a_joiner_holds_nothing_and_changes_nothing():
    new = Standing(device="new", step=0, samples_seen=0)
    assert settle([standing("a", 5), new], NAMES).step == 5


def test_moves_fill_what_is_missing_and_balance_the_senders():
    holders = {"w": ("a", "b"), "b": ("a", "b"), "x": ("b",)}
    wanted = {"a": ("w", "b", "x"), "c": ("w", "b")}
    assert moves(holders, wanted, {"w": 8, "b": 4, "x": 1}) == (
        ("b", "a", "c"),
        ("w", "b", "c"),
        ("x", "b", "a"),
    )


def test_what_a_device_that_stood_by_holds_has_become_old():
    """Story: a plan without a part for c ran two steps before c was asked to leave; it was taken for torn."""
    c = standing("c", 5, stood_by=True)
    assert settle([c, standing("a", 7, ballot=ballot(6))], NAMES).holders == {"w": ("a",), "b": ("a",)}
    assert settle([c, standing("a", 5)], NAMES).holders["w"] == ("c", "a")


def test_statistics_are_of_the_device_that_was_in_all_waves():
    """Story: a device that was in the first wave of each step gave its statistics to all others."""
    whole, part = standing("a", 7), standing("b", 7, partly=("b",))
    assert settle([part, whole], NAMES).holders == {"w": ("b", "a"), "b": ("a",)}
    assert settle([part, standing("c", 7, partly=("b",))], NAMES).holders == {"w": ("b", "c"), "b": ("b",)}


def test_the_loss_scale_goes_on_or_back_with_the_rest():
    """Story: each change of devices began with the first loss scale, and its overflows, anew."""
    now, before = ScaleState(value=1024, good_steps=7), ScaleState(value=4096, good_steps=2)
    assert settle([standing("a", 7, loss_scale=now), standing("b", 7)], NAMES).loss_scale == now
    kept = Snapshot(step=6, samples_seen=48, names=NAMES, loss_scale=before)
    told = settle([standing("a", 7, holds=("w",), loss_scale=now, snapshots=(kept,))], NAMES)
    assert told.rewind and told.loss_scale == before
