"""The order of rates, what they say of whom, and processes that do not come."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from evener.core.ways import Attempt, PeerCopy, Spot
from evener.errors import PeerLostError
from evener.probing.preflight import Board, Party, names_of, orders_for, preflight, with_rates


def spot(process, host):
    return Spot(process=process, host=host, port=1)


def attempt(source, target, interface="eth0", error=""):
    return Attempt(source=source, target=target, interface=interface, address="10.0.0.1", error=error)


SPOTS = [spot("a0", "a"), spot("a1", "a"), spot("b0", "b"), spot("c0", "c")]


def test_one_rate_for_each_pair_of_hosts_and_interface():
    everyone = [s.process for s in SPOTS]
    attempts = [attempt(x, y) for x in everyone for y in everyone if x != y]
    orders = orders_for(SPOTS, attempts)
    hosts = {s.process: s.host for s in SPOTS}
    pairs = [(hosts[o.attempt.source], hosts[o.attempt.target]) for o in orders.orders]
    assert sorted(pairs) == [("a", "b"), ("a", "c"), ("b", "a"), ("b", "c"), ("c", "a"), ("c", "b")]
    for turn in {o.turn for o in orders.orders}:
        busy = [
            hosts[p] for o in orders.orders if o.turn == turn for p in (o.attempt.source, o.attempt.target)
        ]
        assert len(busy) == len(set(busy))
    assert orders.left_out == 0


def test_what_failed_is_not_measured_and_what_there_is_no_time_for_is_counted():
    assert orders_for(SPOTS, [attempt("a0", "b0", error="no answer")]).orders == ()
    many = [spot(f"p{i}", f"h{i}") for i in range(14)]
    attempts = [attempt(x.process, y.process) for x in many for y in many if x is not y]
    orders = orders_for(many, attempts)
    assert orders.left_out > 0 and len(orders.orders) + orders.left_out == 14 * 13


def test_the_rate_of_two_hosts_is_that_of_all_their_processes():
    attempts = [attempt("a0", "b0"), attempt("a1", "b0"), attempt("b0", "a0"), attempt("a0", "c0")]
    seen = [Attempt(source="a0", target="b0", interface="eth0", address="x", bytes_per_s=5.0)]
    found = with_rates(SPOTS, attempts, seen)
    assert [a.bytes_per_s for a in found] == [5.0, 5.0, None, None]
    lied = [Attempt(source="a0", target="b0", interface="eth0", address="x", error="data arrives changed")]
    assert [bool(a.error) for a in with_rates(SPOTS, attempts, lied)] == [True, True, False, False]


def test_who_does_not_come_is_named():
    board = Board(dist.HashStore())
    party = Party(names=("lab1", "lab2", "lab3"), number=0, host="here", board=board)
    with pytest.raises(PeerLostError, match="lab2, lab3 of the job never came"):
        preflight(party, environment={}, come_s=0.2)
    with pytest.raises(PeerLostError, match="process 1 of the preflight never came"):
        names_of(Board(dist.HashStore()), 0, 2, "lab1", come_s=0.2)


def test_names_that_are_the_same_get_their_number():
    store = dist.HashStore()
    Board(store).put("name/1", "lab")
    assert names_of(Board(store), 0, 2, "lab") == ("lab/0", "lab/1")


def test_three_processes_of_one_host_meet_over_loopback():
    store = dist.HashStore()
    names = ("a/0", "a/1", "a/2")

    def one(number):
        party = Party(names=names, number=number, host="a", board=Board(store))
        return preflight(party, environment={"NCCL_DEBUG": "WARN"}, come_s=10)

    with ThreadPoolExecutor(3) as pool:
        verdicts = list(pool.map(one, range(3)))
    assert verdicts[0] == verdicts[1] == verdicts[2]
    (verdict, *_) = verdicts
    assert len(verdict.ways) == 3 and verdict.dead == () and verdict.seconds < 10
    assert {d.interface for d in verdict.doors} == {"lo"}
    assert verdict.notes == ("kept: NCCL_DEBUG=WARN (every process)",)


def test_copies_of_cards_that_lie_reach_all_processes_of_the_host():
    store = dist.HashStore()

    def one(number):
        party = Party(names=("a/0", "a/1"), number=number, host="a", board=Board(store))
        lies = (PeerCopy(a="a/0", b="a/1", state="lies"),)
        return preflight(party, environment={}, copies=lambda: (lies, ""), come_s=10)

    with ThreadPoolExecutor(2) as pool:
        verdict, _ = pool.map(one, range(2))
    assert verdict.variables == {"a/0": {"NCCL_P2P_DISABLE": "1"}, "a/1": {"NCCL_P2P_DISABLE": "1"}}
    assert "arrive changed" in verdict.notes[0]
