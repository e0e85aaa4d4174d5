"""Over real links a device sends when its own clock says, and has what came when it came."""

import pytest
import torch

from evener.core.fleet import Device, Fleet
from evener.rehearsal.channel import PacedChannel
from evener.rehearsal.real import Moments, RealChannel, RealWire
from tests.unit.rehearsal.fakes import DEVICE, PRODUCT_S, open_fake, products


class SlowLink:
    """A wire and channel that really takes `seconds` from when it was asked."""

    def __init__(self, clock, seconds):
        self.clock, self.seconds = clock, seconds
        self.left_s: list[float] = []
        self.sent: tuple = ()

    def all_reduce(self, buffer, key, *, exact_tail=0):
        self.left_s.append(self.clock.now_s)
        buffer.mul_(2)
        return self

    def send(self, tensors, to, key):
        self.left_s.append(self.clock.now_s)
        self.sent = tensors
        return self

    def receive(self, source, key, *, device):
        return self

    sent_s = None

    def wait(self):
        self.clock.now_s = max(self.clock.now_s, self.left_s[-1] + self.seconds)
        return self.sent


def driven(seconds: float):
    driver, clock = open_fake()
    return driver, clock, SlowLink(clock, seconds), Moments(driver, clock, clock.sleep)


def warm(driver, clock) -> None:
    driver.run("0F0", products(5, clock))  # counted: it takes what it takes


def test_a_sum_leaves_when_the_device_is_so_far_and_is_there_when_it_came() -> None:
    driver, clock, link, moments = driven(0.5)
    wire = RealWire(link, moments, lambda num_bytes: 0.0)
    warm(driver, clock)
    start_s = driver.now()
    driver.run("0F1", products(5, clock))
    buffer = torch.ones(4)
    pending = wire.all_reduce(buffer, "step 0, bucket 0")
    assert link.left_s[0] == pytest.approx(start_s + 5 * PRODUCT_S, abs=1e-4)
    pending.wait()
    assert driver.now() == pytest.approx(start_s + 5 * PRODUCT_S + 0.5, abs=1e-3)
    assert buffer.tolist() == [2.0] * 4


def test_a_sum_launched_in_an_action_leaves_no_earlier_than_the_device_launches_it() -> None:
    driver, clock, link, moments = driven(0.5)
    wire = RealWire(link, moments, lambda num_bytes: 0.0)

    def work():
        products(5, clock)()
        made = wire.all_reduce(torch.ones(4), "step 0, bucket 0")
        products(5, clock)()
        return made

    driver.run("0B0", work).wait()
    start_s = driver.now()
    pending = driver.run("0B1", work)
    assert link.left_s[1] == pytest.approx(start_s + 5 * PRODUCT_S, abs=1e-3)
    assert driver.now() == pytest.approx(start_s + 10 * PRODUCT_S, abs=1e-3)
    pending.wait()
    assert driver.now() == pytest.approx(start_s + 5 * PRODUCT_S + 0.5, abs=1e-3)


def test_a_sum_ends_no_earlier_than_it_takes_inside_hosts() -> None:
    driver, clock, link, moments = driven(0.1)
    wire = RealWire(link, moments, lambda num_bytes: num_bytes / 32)
    warm(driver, clock)
    start_s = driver.now()
    wire.all_reduce(torch.ones(4), "step 0, bucket 0").wait()  # 16 bytes: 0.5 s
    assert driver.now() == pytest.approx(start_s + 0.5, abs=1e-3)


def test_messages_to_other_hosts_take_real_links_and_others_do_not_wait() -> None:
    driver, clock, link, moments = driven(0.3)
    fleet = Fleet(devices=(DEVICE, Device(name="a/y", kind="k"), Device(name="b/x", kind="k")))
    channel = RealChannel(PacedChannel(link, driver, fleet), moments)
    warm(driver, clock)
    start_s = driver.now()
    channel.send((torch.ones(1),), "b/x", "0SEND_F0 of step 0").wait()
    coming = channel.receive("b/x", "0SEND_F0 of step 0", device=torch.device("cpu"))
    (values,) = coming.wait()
    assert values.tolist() == [1.0]
    assert driver.now() == pytest.approx(start_s + 0.3, abs=1e-3)
    near_s = driver.now()
    channel.send((torch.ones(1),), "a/y", "0SEND_F1 of step 0").wait()
    channel.receive("a/y", "0SEND_F1 of step 0", device=torch.device("cpu")).wait()
    assert driver.now() == near_s  # no link inside is named: no time
