"""What crosses a cut takes the link's seconds, and nothing more for having come to an accelerator."""

import torch
from msgspec.structs import replace

from evener.core.figures import line
from evener.core.fleet import Fleet, Link
from evener.rehearsal.channel import PacedChannel
from evener.rehearsal.device.clock import Clock
from evener.rehearsal.device.driver import CardDriver
from evener.runtime.channels.channel import open_channel
from evener.runtime.channels.local import Hub
from evener.runtime.ranks import Ranks
from tests.local.device.opening import card_of
from tests.local.pool import Pool

NAMES = ("lab/gpu0", "lab/gpu1")


def taken(rank: int, world_size: int) -> list[float]:
    """Seconds on the receiver's clock, sender and receiver being one card: a message of 10 ms comes late or
    has long been there.
    """
    card = card_of(clock=Clock(host_counts=False), link=line(5e-3, 1e9))
    driver = CardDriver(card)
    both = (card.device, replace(card.device, name=NAMES[1]))
    links = Fleet(devices=both, links=(Link(a=NAMES[0], b=NAMES[1], curve=line(0.01, 1e9)),))
    hub = Hub()
    here, there = (PacedChannel(open_channel(Ranks(NAMES, n), hub=hub), driver, links) for n in NAMES)
    found = []
    for pause_s in (0.0, 0.05):
        begin_s = driver.now()
        here.send((torch.ones(8, device="rehearsal"),), NAMES[1], f"m {pause_s}")
        driver.advance(begin_s + pause_s)
        there.receive(NAMES[0], f"m {pause_s}", device=card.torch_device).wait()
        found.append(driver.now() - begin_s)
    return found


def test_a_message_takes_its_links_seconds_alone(pool: Pool) -> None:
    ((late, early),) = pool.run(taken, 1)
    assert abs(late - 0.01) < 1e-4 and abs(early - 0.05) < 1e-4
