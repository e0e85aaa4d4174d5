"""Which interface each process takes and why, from attempts written by hand."""

import pytest

from evener.core.host import Interface
from evener.core.ways import Attempt, PeerCopy, Spot, decide, mbit, peer_variables

DOCKER = Interface(name="docker0", addresses=("172.17.0.1",))


def spot(number, *, route="eth0", extra=(), **environment):
    eth = [Interface(name=f"eth{k}", addresses=(f"10.{k}.0.{number}",)) for k in range(2)]
    return Spot(
        process=f"lab{number}",
        host=f"host{number}",
        port=1000 + number,
        interfaces=(DOCKER, *eth, *extra),
        route=route,
        environment=environment,
    )


def tried(source, target, interface, *, error="", rate=None, latency=1e-4):
    return Attempt(
        source=source.process,
        target=target.process,
        interface=interface,
        address=target.doors.get(interface, ""),
        latency_s=None if error else latency,
        bytes_per_s=rate,
        error=error,
    )


def everything(spots, **by_interface):
    """Attempts of every pair in both directions; what is not named goes well on eth0 and eth1."""
    found = []
    for a in spots:
        for b in spots:
            if a is not b:
                found.append(tried(a, b, "docker0", error="somebody else answers there"))
                for name in ("eth0", "eth1"):
                    found.append(tried(a, b, name, **by_interface.get(name, {})))
    return found


def doors(verdict):
    return {d.process: d.interface for d in verdict.doors}


def test_the_route_is_taken_and_docker0_never():
    spots = [spot(1), spot(2)]
    verdict = decide(spots, everything(spots))
    assert doors(verdict) == {"lab1": "eth0", "lab2": "eth0"}
    assert verdict.dead == ()
    assert verdict.variables["lab1"] == {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0"}


def test_a_route_that_fails_is_left_for_what_works():
    spots = [spot(1), spot(2)]
    verdict = decide(spots, everything(spots, eth0={"error": "no answer within 3 s"}))
    assert doors(verdict) == {"lab1": "eth1", "lab2": "eth1"}
    assert verdict.doors[0].why == "eth1, not eth0 of the route: no answer within 3 s"


def test_a_pair_that_lies_is_routed_around_as_one_that_fails():
    spots = [spot(1), spot(2)]
    verdict = decide(spots, everything(spots, eth0={"error": "data arrives changed (block 3 of 9)"}))
    assert doors(verdict) == {"lab1": "eth1", "lab2": "eth1"}
    assert "data arrives changed" in verdict.doors[0].why


@pytest.mark.parametrize(("other", "taken"), [(17e6, "eth0"), (18.5e6, "eth1")])
def test_another_interface_is_taken_where_it_is_half_as_fast_again(other, taken):
    spots = [spot(1), spot(2)]
    verdict = decide(spots, everything(spots, eth0={"rate": 12e6}, eth1={"rate": other}))
    assert set(doors(verdict).values()) == {taken}
    (way,) = verdict.ways
    assert way.bytes_per_s == (12e6 if taken == "eth0" else other)


def test_the_slowest_peer_sets_the_rate_of_an_interface():
    spots = [spot(1), spot(2), spot(3)]
    attempts = everything(spots, eth0={"rate": 12e6}, eth1={"rate": 100e6})
    slow = [a for a in attempts if (a.source, a.target, a.interface) != ("lab3", "lab1", "eth1")]
    slow.append(tried(spots[2], spots[0], "eth1", rate=1e6))
    assert doors(decide(spots, slow))["lab1"] == "eth0"


def test_a_pair_parted_on_the_route_meets_elsewhere_and_the_third_stays():
    spots = [spot(1), spot(2), spot(3)]
    bad = {("lab2", "lab3"), ("lab3", "lab2")}
    attempts = [
        a.__class__(**{f: getattr(a, f) for f in a.__struct_fields__} | {"error": "no route to host"})
        if a.interface == "eth0" and (a.source, a.target) in bad
        else a
        for a in everything(spots)
    ]
    verdict = decide(spots, attempts)
    assert doors(verdict) == {"lab1": "eth0", "lab2": "eth1", "lab3": "eth1"}
    assert verdict.dead == ()


def test_a_dead_pair_is_named_with_all_that_was_tried():
    spots = [spot(1), spot(2)]
    failed = {"error": "no answer within 3 s"}
    (way,) = decide(spots, everything(spots, eth0=failed, eth1=failed)).dead
    assert "lab1 and lab2 do not reach each other" in way.why
    assert "10.0.0.2 (eth0 of lab2): no answer within 3 s" in way.why
    assert "172.17.0.1 (docker0 of lab2): somebody else answers there" in way.why


def test_one_direction_is_not_enough():
    spots = [spot(1), spot(2)]
    attempts = [a for a in everything(spots) if (a.source, a.interface) == ("lab1", "eth0")]
    (way,) = decide(spots, attempts).dead
    assert "lab1 reaches lab2, but not the other way round" in way.why and "firewall" in way.why


def test_the_users_interface_is_kept_though_another_is_better():
    spots = [spot(1, GLOO_SOCKET_IFNAME="eth1"), spot(2)]
    verdict = decide(spots, everything(spots, eth0={"rate": 100e6}, eth1={"rate": 1e6}))
    (door, _) = verdict.doors
    assert (door.interface, door.by_user) == ("eth1", True)
    assert "GLOO_SOCKET_IFNAME=eth1 of yours is kept" in door.why
    assert verdict.variables["lab1"] == {"NCCL_SOCKET_IFNAME": "eth1"}
    assert "kept: GLOO_SOCKET_IFNAME=eth1 (lab1)" in verdict.notes


def test_the_users_interface_that_nobody_reaches_is_blamed():
    spots = [spot(1, GLOO_SOCKET_IFNAME="docker0"), spot(2)]
    verdict = decide(spots, everything(spots))
    assert "lab2 cannot reach it" in verdict.doors[0].why
    assert len(verdict.dead) == 1
    gone = decide([spot(1, GLOO_SOCKET_IFNAME="ib0"), spot(2)], everything(spots))
    assert "ib0 has no address that others could reach" in gone.doors[0].why


def test_doors_are_addresses_that_others_may_dial():
    extra = (
        Interface(name="lo", addresses=("127.0.0.1", "::1")),
        Interface(name="down0", up=False, addresses=("10.5.0.1",)),
        Interface(name="six0", addresses=("fe80::1", "fd00::1")),
        Interface(name="both0", addresses=("fd00::2", "10.6.0.1")),
        Interface(name="auto0", addresses=("169.254.0.5",)),
    )
    assert spot(1, extra=extra).doors == {
        "docker0": "172.17.0.1",
        "eth0": "10.0.0.1",
        "eth1": "10.1.0.1",
        "six0": "fd00::1",
        "both0": "10.6.0.1",
    }


def test_processes_of_one_host_talk_over_loopback_and_need_no_variable():
    from msgspec.structs import replace

    lo = Interface(name="lo", addresses=("127.0.0.1", "::1"))
    spots = [replace(spot(i, extra=(lo,)), host="a", within=True) for i in (1, 2)]
    assert spots[0].doors == {"lo": "127.0.0.1"}
    verdict = decide(spots, [tried(*spots, "lo"), tried(*reversed(spots), "lo")])
    assert doors(verdict) == {"lab1": "lo", "lab2": "lo"} and verdict.dead == ()
    assert verdict.variables == {"lab1": {}, "lab2": {}}


def test_direct_copies_that_lie_go_through_host_memory():
    lies = PeerCopy(a="a/0", b="a/1", state="lies")
    assert peer_variables([PeerCopy(a="a/0", b="a/1", state="direct")], {}) == ({}, [])
    variables, said = peer_variables([lies], {})
    assert variables == {"NCCL_P2P_DISABLE": "1"} and "arrive changed" in said[0]
    variables, said = peer_variables([lies], {"NCCL_P2P_DISABLE": "0"})
    assert variables == {} and "set it to 1" in said[0]


def test_rates_in_the_words_of_networks():
    assert mbit(11.9e6) == "95.2 Mbit/s"
    assert mbit(1.2e9) == "9.6 Gbit/s"
