"""Memory that is reserved and unused goes back between steps; the setting of expandable segments holds."""

import torch

from evener.rehearsal.device.clock import Clock
from evener.runtime.tidying import Tidier, held_on
from tests.local.device.opening import card_of
from tests.local.pool import Pool

MIB = 2**20


def crowded(rank: int, world_size: int) -> None:
    from evener.rehearsal.device.driver import CardDriver

    card = card_of(memory=64 * MIB, clock=Clock(host_counts=False))
    tidier = Tidier(card.torch_device, CardDriver(card))

    def step(sizes: tuple[int, ...]) -> None:
        held = [torch.empty(n * MIB, dtype=torch.uint8, device="rehearsal") for n in sizes]
        del held

    step((30, 20))
    assert tidier.between_steps() is None and not tidier.told()  # nothing failed
    step((50,))  # 30 and 20 are cached, and neither is large enough: the allocator gives them back
    assert card.memory.num_retries == 1
    assert tidier.between_steps() is not None and "no room 1 time in" in tidier.sentences[0]
    assert held_on(card.torch_device).reserved == 0
    assert tidier.told().startswith("unused memory was given back between steps 1 time, in 0 ms altogether")
    assert "no room 1 time in" in tidier.told()
    step((30, 20))
    assert card.memory.num_retries == 1 and tidier.between_steps() is None


def test_what_stands_in_the_way_is_given_back_between_steps(pool: Pool) -> None:
    pool.run(crowded, 1)


def expandable(rank: int, world_size: int) -> int:
    card = card_of(memory=64 * MIB, expandable=True)
    for sizes in ((30, 20), (50,)):
        held = [torch.empty(n * MIB, dtype=torch.uint8, device="rehearsal") for n in sizes]
        del held
    return card.memory.num_retries


def test_expandable_segments_need_no_second_try(pool: Pool) -> None:
    assert pool.run(expandable, 1) == [0]
