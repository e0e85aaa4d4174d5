"""The preflight between hosts: namespaces with a shaped slow link, a dead one, and a pair that is parted."""

import json
import time

import pytest

from evener.cli.main import main
from tests.local.namespaces import Network, needs_root

pytestmark = [needs_root, pytest.mark.timeout(90)]
SLOW_MBIT = 100


def preflight(network, count, **environment):
    """(exit code, verdict, text) of each process."""
    place = f"{network.address(1)}:29400"
    running = []
    for i in range(count):
        words = ["preflight", "--meet", place, "--wait", "30", "--processes", str(count), "--number", str(i)]
        running.append(network.start(i + 1, main, [*words, "--name", f"lab{i + 1}", "--json"], **environment))
    done = []
    for process in running:
        code, out, err = process.finish()
        done.append((code, json.loads(out.splitlines()[-1]) if out else {}, err))
    return done


def doors(verdict):
    return {d["process"]: d["interface"] for d in verdict["doors"]}


def test_the_right_interface_and_the_rate_of_a_shaped_link_beside_a_dead_one():
    """docker0 comes first and leads nowhere, eth1 is up and dead, eth0 is shaped to 100 Mbit/s."""
    with Network(hosts=2, switches=2) as network:
        network.shape(0, SLOW_MBIT)
        network.kill(1)
        done = preflight(network, 2)
    for code, verdict, err in done:
        assert code == 0, err
        assert doors(verdict) == {"lab1": "eth0", "lab2": "eth0"}
        (way,) = verdict["ways"]
        assert way["bytes_per_s"] * 8 == pytest.approx(SLOW_MBIT * 1e6, rel=0.10)
        assert verdict["seconds"] < 10
        assert verdict["variables"]["lab1"]["GLOO_SOCKET_IFNAME"] == "eth0"
    assert "eth0: the route to the others" in done[0][2]


def test_a_faster_interface_than_the_routes_is_taken():
    with Network(hosts=2, switches=2) as network:
        network.shape(0, SLOW_MBIT)
        done = preflight(network, 2)
    for code, verdict, err in done:
        assert code == 0, err
        assert doors(verdict) == {"lab1": "eth1", "lab2": "eth1"}
        assert "though that is the route" in verdict["doors"][0]["why"]


def test_a_dead_pair_is_routed_around():
    """lab2 and lab3 do not reach each other over eth0: they take eth1, and lab1 keeps the route."""
    with Network(hosts=3, switches=2) as network:
        network.part_pair(2, 3)
        network.shape(1, SLOW_MBIT)
        done = preflight(network, 3)
    for code, verdict, err in done:
        assert code == 0, err
        assert doors(verdict) == {"lab1": "eth0", "lab2": "eth1", "lab3": "eth1"}
        assert verdict["dead"] == [] and verdict["seconds"] < 10
        assert "eth1, not eth0 of the route" in err


def test_a_dead_pair_without_another_way_is_named_within_ten_seconds():
    with Network(hosts=3, switches=1) as network:
        network.part_pair(2, 3)
        done = preflight(network, 3)
    for code, verdict, err in done:
        assert code == 1
        (dead,) = verdict["dead"]
        assert (dead["a"], dead["b"]) == ("lab2", "lab3")
        assert "lab2 and lab3 do not reach each other" in err and network.address(3) in err
        assert verdict["seconds"] < 10


def test_the_users_interface_is_kept_and_named_where_it_harms():
    with Network(hosts=2, switches=1) as network:
        done = preflight(network, 2, GLOO_SOCKET_IFNAME="docker0", NCCL_DEBUG="WARN")
    for code, verdict, err in done:
        assert code == 1
        assert "GLOO_SOCKET_IFNAME=docker0 of yours is kept" in err and "cannot reach it" in err
        assert "kept: NCCL_DEBUG=WARN (every process)" in err
        assert "GLOO_SOCKET_IFNAME" not in verdict["variables"]["lab1"]


def timed(words):
    """The command, and at the end the seconds it took, without those of the process's start."""
    begin = time.monotonic()
    try:
        main(words)
    finally:
        print(time.monotonic() - begin)


def test_who_does_not_reach_the_meeting_place_says_so_within_ten_seconds():
    with Network(hosts=2, switches=1) as network:
        network.kill(0)
        place = f"{network.address(1)}:29400"
        words = ["preflight", "--meet", place, "--processes", "2", "--number", "1"]
        code, out, err = network.start(2, timed, words).finish()
    assert code == 2
    assert "does not reach the meeting place" in err and network.address(2) in err
    assert float(out.splitlines()[-1]) < 10


def sum_over_gloo(number, place):
    """What a job does after its preflight: a group of two, and a sum."""
    import torch
    import torch.distributed as dist

    host, _, port = place.rpartition(":")
    store = dist.TCPStore(host, int(port), 2, number == 0)
    dist.init_process_group("gloo", store=store, rank=number, world_size=2)
    summed = torch.full((1000,), float(number + 1))
    dist.all_reduce(summed)
    print(summed.sum().item())


def test_gloo_forms_a_group_over_what_was_chosen():
    with Network(hosts=2, switches=1) as network:
        variables = preflight(network, 2)[0][1]["variables"]
        place = f"{network.address(1)}:29800"
        running = [
            network.start(i + 1, sum_over_gloo, i, place, **variables[f"lab{i + 1}"]) for i in range(2)
        ]
        said = [process.finish() for process in running]
    assert [out.strip() for _, out, _ in said] == ["3000.0", "3000.0"], said
