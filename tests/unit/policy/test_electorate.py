"""Of a job that is cut in two, one part goes on at most."""

import random

import pytest

from evener.core.membership import Electorate
from evener.policy.electorate import may_go_on

FIRST = ""


def of(devices: str, bound: str = "", store: str = FIRST) -> Electorate:
    return Electorate(devices=tuple(devices), bound=tuple(bound), store=store)


@pytest.mark.parametrize(
    ("devices", "bound", "present", "store", "expected"),
    [
        ("abc", "a", "bc", "b:1", True),  # the store's host is lost
        ("abc", "a", "c", "b:1", False),
        ("abcd", "ab", "cd", "c:1", False),  # cut in halves: who has the store goes on
        ("abcd", "ab", "ab", FIRST, True),
        ("abcd", "ab", "b", FIRST, True),  # a is nowhere else
        ("abcde", "ab", "ab", FIRST, False),  # c, d and e may go on elsewhere
        ("abcde", "ab", "abc", FIRST, True),
        ("ab", "a", "b", "b:1", False),
        ("abcd", "abcd", "d", FIRST, True),  # nobody joined from elsewhere: as ever
        ("bc", "b", "b", "b:1", True),  # after it moved to b
        ("bc", "b", "c", "c:1", False),
    ],
)
def test_who_may_go_on(devices: str, bound: str, present: str, store: str, expected: bool) -> None:
    electorate = of(devices, bound, FIRST if "a" in devices else "b:1")
    goes_on, why = may_go_on([electorate], tuple(present), store)
    assert goes_on == expected
    assert f"of {len(devices)} devices are here" in why or "all" in why


def test_who_was_in_no_generation_does_not_go_on_alone() -> None:
    assert not may_go_on([], ("c",), FIRST)[0]


def test_a_generation_that_may_not_have_been_formed_asks_for_both() -> None:
    before, after = of("abcde", "a"), of("abc", "a")
    assert may_go_on([before], "cde", "c:1")[0]
    assert not may_go_on([before, after], "cde", "c:1")[0]  # a and b may have formed the second without c
    assert not may_go_on([before, after], "ab", FIRST)[0]  # it was not formed: c may be with d and e
    assert may_go_on([after], "ab", FIRST)[0]


@pytest.mark.parametrize("seed", range(300))
def test_two_parts_never_go_on_both(seed: int) -> None:
    """Generations begin and are formed or not, anywhere devices are cut off; each part asks by what it knows.

    The store keeps the newest roll: who is not on it joins again without anything, or not at all.
    """
    draw = random.Random(seed)
    names = "abcdefg"[: draw.randint(2, 7)]
    bound = names[: draw.randint(1, len(names))]
    known: dict[str, tuple[Electorate, ...]] = {d: (of(names, bound),) for d in names}
    dead = [d for d in bound if draw.random() < 0.3]
    roll = list(names)
    for _ in range(draw.randint(0, 4)):
        there = [d for d in names if d not in dead and draw.random() < 0.8]
        for d in there:
            if d not in roll:
                known[d] = ()  # it finds that it was taken for lost: what it had is void
        asked = tuple({e: None for d in there if d in roll for e in known[d]})
        if not may_go_on(asked, [d for d in there if known[d]], FIRST)[0]:
            continue
        after = of("".join(there), "".join(d for d in there if d in bound))
        roll = there
        saw = there if draw.random() < 0.5 else [d for d in there if draw.random() < 0.5]
        for d in saw:
            known[d] = (*asked, after)
        for d in saw if saw == there else ():
            if draw.random() < 0.5:  # it was told that all have seen it
                known[d] = (after,)
    away = [d for d in names if d not in bound and known[d] and draw.random() < 0.6]
    stays = [d for d in roll if d not in away and d not in dead and known[d]]
    go_on = [
        may_go_on([e for d in part for e in known[d]], part, at)[0]
        for part, at in ((stays, FIRST), (away, "c:1"))
    ]
    assert not all(go_on)
