"""A fleet becomes namespaces and commands: the whole list of a small fleet, and what is refused."""

import pytest

from evener.core.figures import Curve, line
from evener.core.fleet import Device, Fleet, Link
from evener.errors import UsageError
from evener.rehearsal.real_hosts import (
    MOST_HOSTS,
    bytes_per_s,
    check_hosts,
    commands,
    delays,
    inside_hosts,
    segments,
)


def fleet(*links: Link, hosts: tuple[str, ...] = ("a", "b", "c")) -> Fleet:
    devices = tuple(Device(name=f"{h}/{i}", kind="k") for h in hosts for i in range(2))
    return Fleet(devices=devices, links=links)


SLOW = line(1e-3, 12.5e6)
THREE = fleet(
    Link(a="a", b="a", curve=line(1e-5, 1e9)),
    Link(a="a", b="b", curve=SLOW),
    Link(a="c", b="b", curve=Curve(points=((0, 2e-3),), source="assumed")),
)


def test_commands_of_three_hosts_with_two_links(golden) -> None:
    listed = [f"{c.place:9} {' '.join(c.words)}" for c in (*commands(THREE), *delays(THREE))]
    golden("real_links.txt", "\n".join(listed) + "\n")


def test_no_word_comes_from_the_file_but_places_and_names_of_interfaces_are_short() -> None:
    wild = fleet(Link(a="; rm -rf", b="-x", curve=SLOW), hosts=("; rm -rf", "-x"))
    for made in (*commands(wild), *delays(wild)):
        names = [made.words[i + 1] for i, w in enumerate(made.words) if w in ("dev", "name", "add", "master")]
        assert all(len(n) < 16 for n in names)
        places = [made.words[i + 1] for i, w in enumerate(made.words) if w == "netns"]
        assert all(w not in places or w == "switches" for w in made.words)
        assert not any("rm" in w or w == "-x" for w in made.words)


def test_a_host_called_switches_is_no_switch() -> None:
    made = commands(fleet(Link(a="switches", b="b", curve=SLOW), hosts=("switches", "b")))
    assert {c.place for c in made} == {"switches", "host switches", "host b"}


def test_links_of_one_bus_are_one_switch_and_their_ways_in_are_shaped_too() -> None:
    pairs = (("a", "b"), ("b", "c"), ("a", "c"))
    shared = fleet(*(Link(a=a, b=b, curve=SLOW, bus="net") for a, b in pairs))
    (segment,) = segments(shared)
    assert segment.hosts == ("a", "b", "c")
    shaped = [c for c in commands(shared) if "tbf" in c.words]
    assert [c.place for c in shaped].count("switches") == 3 == len(shaped) - 3


def test_what_stays_paced_is_inside_hosts() -> None:
    assert [(x.a, x.b) for x in inside_hosts(THREE).links] == [("a", "a")]
    assert inside_hosts(THREE).link("a/0", "b/0") is None


def test_the_rate_is_the_slope_at_the_end() -> None:
    curve = Curve(points=((0, 1e-3), (1e6, 2e-3), (2e6, 4e-3)), source="assumed")
    assert bytes_per_s(curve) == pytest.approx(5e8)
    assert bytes_per_s(Curve(points=((0, 1e-3), (1e6, 1e-3)), source="assumed")) is None


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (fleet(hosts=("a",)), "the fleet has 1"),
        (fleet(hosts=tuple(f"h{i}" for i in range(MOST_HOSTS + 1))), f"the fleet has {MOST_HOSTS + 1}"),
        (fleet(Link(a="a/0", b="b/1", curve=SLOW)), "a/0 - b/1"),
        (
            fleet(
                Link(a="a", b="b", curve=SLOW, bus="x"), Link(a="b", b="c", curve=line(1e-3, 1e6), bus="x")
            ),
            "different curves",
        ),
    ],
)
def test_what_namespaces_cannot_be(wrong: Fleet, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        check_hosts(wrong)
