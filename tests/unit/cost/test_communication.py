"""Messages, collectives, gradient buckets and memory: worked numbers."""

import numpy as np
import pytest

from evener.core.figures import Curve, line
from evener.core.fleet import Device, Fleet, Link
from evener.core.profile import Layer, Profile
from evener.cost.communication import Network, shares_send_s
from evener.cost.memory import load_peak_bytes, model_bytes, stage_memory
from evener.cost.overlap import gradient_buckets, tail
from evener.cost.reduce import Holder, reduction_ends

MIB = 2**20


def flat(seconds):
    return Curve(points=((0.0, seconds),), source="assumed")


def network(hosts, inside, between, missing=False):
    devices = tuple(Device(name=f"h{h}/{d}", kind="k") for h, n in enumerate(hosts) for d in range(n))
    links = [Link(a=f"h{h}", b=f"h{h}", curve=inside) for h in range(len(hosts))]
    pairs = [(a, b) for a in range(len(hosts)) for b in range(a)]
    links += [] if missing else [Link(a=f"h{a}", b=f"h{b}", curve=between) for a, b in pairs]
    return Network(fleet=Fleet(devices=devices, links=tuple(links)))


def test_a_message_and_a_missing_link():
    net = network([1, 1], flat(1.0), line(1e-3, 1e9))
    assert net.send_s("h0/0", "h1/0", 1e6) == pytest.approx(2e-3)
    assert net.send_s("h0/0", "h0/0", 1e6) == 0
    lonely = network([1, 1], flat(1.0), flat(1.0), missing=True)
    assert lonely.send_s("h0/0", "h1/0", 1e6) == 0
    assert lonely.missing == {("h0/0", "h1/0")}


def test_two_levels_beat_a_ring_through_slow_links():
    net = network([2, 2], flat(1e-3), flat(10e-3))
    names = ("h0/0", "h0/1", "h1/0", "h1/1")
    assert net.two_level_all_reduce_s(names, 1.0) == pytest.approx(22e-3)
    assert net.flat_all_reduce_s(names, 1.0) == pytest.approx(60e-3)
    assert net.all_reduce_s(names, 1.0) == pytest.approx(22e-3)


def test_shares_send_what_overlaps():
    net = network([3], line(1e-3, 1e9), flat(1.0))
    assert shares_send_s(net, [("h0/0", 2)], [("h0/1", 1), ("h0/2", 1)], 1e6) == pytest.approx(4e-3)
    assert shares_send_s(net, [("h0/0", 2)], [("h0/0", 2)], 1e6) == 0


def layers(*sizes):
    made = tuple(
        Layer(name=str(i), num_params=1, param_bytes=s, flops_per_sample=1.0) for i, s in enumerate(sizes)
    )
    return Profile(model="m", layers=made)


def test_buckets_are_ready_as_backward_goes():
    buckets = gradient_buckets(layers(5 * MIB, 5 * MIB))
    assert [(b.num_bytes, b.ready) for b in buckets] == [(5 * MIB, 0.5), (5 * MIB, 1.0)]
    pieces = gradient_buckets(layers(16 * MIB))
    assert [b.ready for b in pieces] == [0.5, 1.0]


def test_the_tail_of_two_buckets():
    """Two of 3 s, ready at half and end: behind a backward of 2 s the first starts 1 s before the end."""
    over = tail(gradient_buckets(layers(5 * MIB, 5 * MIB)), lambda _: 3.0)
    assert over.exposed_s(np.array([2.0, 100.0])) == pytest.approx([5.0, 3.0])
    assert over.least_s == 3.0


def test_only_layers_with_two_holders_are_summed():
    net = network([2], flat(1.0), flat(1.0))
    data = model_bytes(layers(MIB, MIB))
    backward = np.array([4.0, 4.0])
    alone = [Holder(device="h0/0", span=(0, 1), end_s=10, backward_s=backward)]
    alone.append(Holder(device="h0/1", span=(1, 2), end_s=6, backward_s=backward))
    assert reduction_ends(net, data, alone) == 0
    both = [Holder(device=f"h0/{i}", span=(0, 2), end_s=10 + i, backward_s=backward) for i in range(2)]
    assert reduction_ends(net, data, both) == pytest.approx(11 + 2.0)


def test_memory_by_holder():
    layer = Layer(
        name="a", num_params=25, param_bytes=100, saved_bytes_per_sample=10, output_bytes_per_sample=1
    )
    data = model_bytes(Profile(model="m", layers=(layer,), state_bytes=200))
    held = stage_memory(data, 0, 1, samples=4, in_flight=3)
    assert (held.parameters, held.gradients, held.optimizer) == (100, 100, 200)
    assert held.activations == 3 * 4 * 10
    assert held.boundary == 2 * 4 * 1
    assert held.reduction == 100
    assert held.total == 100 + 100 + 200 + 120 + 8 + 100
    assert load_peak_bytes(held.parameters, held.optimizer, held.buffers, apart=False) == 600
    assert load_peak_bytes(held.parameters, held.optimizer, held.buffers, apart=True) == 300
    again = stage_memory(data, 0, 1, samples=4, in_flight=3, recompute=True)
    assert again.activations == 4 * 10
