"""What a plan's reductions say about groups and lanes."""

import pytest

from evener.core.exchange import PIECE_BYTES, ROW, adds_spans, exchange_of, without
from evener.core.exchange_seconds import HOST_BYTES_PER_S, PACKINGS, exchange_seconds
from evener.core.figures import line
from evener.core.fleet import Device, Fleet, Link
from evener.core.plan import Reduction
from evener.errors import PlanMismatchError

NAMES = ("a/0", "a/1", "b/0")
GROUP = Reduction(devices=("a/0", "a/1"), transport="gloo")


def lane(*devices: str, part: float = 1.0, **more) -> Reduction:
    return Reduction(devices=devices, transport="gloo", part=part, **more)


def test_no_lanes_are_one_sum() -> None:
    assert exchange_of((), NAMES) is None
    assert exchange_of((Reduction(devices=NAMES, transport="gloo"),), NAMES) is None


def test_groups_and_lanes_are_in_the_order_of_devices() -> None:
    found = exchange_of(
        (lane("b/0", "a/1", part=0.25, adds={"b/0": 3.0, "a/1": 1.0}), GROUP, lane("a/0", "b/0", part=0.75)),
        NAMES,
    )
    assert found is not None
    assert found.groups == (("a/0", "a/1"), ("b/0",))
    assert [x.devices for x in found.lanes] == [("a/1", "b/0"), ("a/0", "b/0")]
    assert found.owners("a/0") == ("a/1", "a/0") and found.owners("b/0") == ("b/0", "b/0")
    assert found.lane_spans(8) == ((0, 2), (2, 8))
    assert adds_spans(found.lanes[0], 8) == ((0, 2), (2, 8))


def test_cuts_are_at_whole_rows_and_few_values_anywhere() -> None:
    """20 MB in ten pieces of 500,000 values, no multiple of 256: int8 padded every slice, 10 % more work."""
    parts = (lane("a/0", "b/0", part=0.3), lane("b/0", "a/1", part=0.7, adds={"a/1": 1.0}), GROUP)
    found = exchange_of(parts, NAMES)
    assert found is not None
    pieces = found.sizes(5_000_000, 4)
    assert sum(pieces) == 5_000_000 and len(pieces) == 10 and max(pieces) * 4 <= PIECE_BYTES
    assert [n % ROW for n in pieces] == [0] * 9 + [5_000_000 % ROW]
    (_, cut), (again, end) = found.lane_spans(pieces[-1])
    assert cut == again and cut % ROW == 0 and end == pieces[-1] and abs(cut / end - 0.3) < ROW / end
    assert adds_spans(found.lanes[1], 65_537) == ((0, 65_537), (65_537, 65_537))  # b adds nothing
    assert found.lane_spans(65_535)[0] == (0, 19_661)  # fewer than 256 rows


@pytest.mark.parametrize(
    ("reductions", "said"),
    [
        ((GROUP, Reduction(devices=("a/1", "b/0"), transport="gloo"), lane("a/0", "b/0")), "same device"),
        ((GROUP, lane("a/0", "a/1")), "one member of each group"),
        ((GROUP, lane("a/0", "b/0", part=0.0)), "sum to nothing"),
        ((GROUP, lane("a/0", "b/0", part=-1.0)), "below 0"),
        ((GROUP, lane("a/0", "b/0", adds={"c/0": 1.0})), "all 0"),
        ((GROUP, lane("a/0", "c/0")), "one member of each group"),
        ((Reduction(devices=NAMES, transport="gloo"), lane("a/0")), "one group"),
        ((Reduction(devices=("a/0", "z/0"), transport="gloo"), lane("a/0", "a/1", "b/0")), "groups hold"),
    ],
)
def test_what_cannot_be_carried_out_is_refused(reductions, said: str) -> None:
    with pytest.raises(PlanMismatchError, match=said):
        exchange_of(reductions, NAMES)


def test_seconds_of_the_example() -> None:
    """20 MB between 2 hosts at 12.5 MB/s: each sends all of it once, 1.6 s, and a little to fill."""
    names = ("a/0", "a/1", "b/0", "b/1")
    fleet = Fleet(
        devices=tuple(Device(name=n, kind="k") for n in names),
        links=(
            Link(a="a", b="a", curve=line(1e-5, 4e9)),
            Link(a="b", b="b", curve=line(1e-5, 4e9)),
            Link(a="a", b="b", curve=line(1e-4, 12.5e6)),
        ),
    )
    reductions = (GROUP, Reduction(devices=("b/0", "b/1"), transport="gloo"), lane("a/0", "b/0"))
    found = exchange_of(reductions, names)
    assert found is not None
    assert exchange_seconds(20e6, found, fleet) == pytest.approx(1.6, rel=0.02)
    small = exchange_of((*reductions[:2], lane("a/0", "b/0", compression="int8")), names)
    assert small is not None
    # Packing goes on beside the link: only that of the first of ten pieces stands before it.
    packed = 2 * 2.5e5 * (PACKINGS["int8"].there + PACKINGS["int8"].back) / HOST_BYTES_PER_S
    assert exchange_seconds(20e6, small, fleet) == pytest.approx(1.6 * 0.254 + packed, rel=0.02)


ALL = (GROUP, Reduction(devices=("b/0", "b/1"), transport="gloo"))


def left(reductions, lost: str):
    """(groups, lanes) of the exchange among those who are left."""
    names = [n for n in ("a/0", "a/1", "b/0", "b/1") if n not in lost]
    kept = reductions
    for name in lost.split():
        kept = without(kept, name)
    found = exchange_of(kept, names)
    return None if found is None else (found.groups, [x.devices for x in found.lanes])


def test_a_lost_device_is_stood_in_for_by_another_of_its_group() -> None:
    two = (*ALL, lane("a/0", "b/0"), lane("a/1", "b/1"))
    assert left(two, "b/1") == ((("a/0", "a/1"), ("b/0",)), [("a/0", "b/0"), ("a/1", "b/0")])
    assert left((*ALL, lane("a/0", "b/0")), "a/0") == ((("a/1",), ("b/0", "b/1")), [("a/1", "b/0")])


def test_a_lost_host_leaves_one_ring() -> None:
    assert left((*ALL, lane("a/0", "b/0")), "a/0 a/1") is None


def test_what_a_lost_device_added_up_its_stand_in_adds_up() -> None:
    uneven = lane("a/0", "b/0", adds={"a/0": 1.0, "b/0": 3.0})
    (found,) = (r for r in without((*ALL, uneven), "b/0") if r.part is not None)
    assert found.adds == {"a/0": 1.0, "b/1": 3.0}
