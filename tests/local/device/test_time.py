"""Time on the device: chains, copies beside the computing and not, waiting, and buffers used too early."""

import time

import pytest
import torch
from torch import nn

from tests.local.device.comparing import raises
from tests.local.device.opening import card_of, pcie
from tests.local.pool import Pool

FLOPS, BYTES_PER_S, LAUNCH_S = 2e9, 1e9, 2e-4


def a_chain(rank: int, world_size: int) -> tuple[float, float, float]:
    """(computed, wall) seconds of 20 rounds of a product and an addition, and what the host took to queue."""
    card_of(flops=FLOPS, bytes_per_s=BYTES_PER_S, launch_s=LAUNCH_S)
    x, y = (torch.ones(256, 256, device="rehearsal") for _ in range(2))
    (x @ y + x).sum().item()
    torch.accelerator.synchronize()
    taken_s = queued_s = float("inf")
    for _ in range(3):
        begin_s = time.monotonic()
        z = x
        for _ in range(20):
            z = z @ y
            z = z + x
        queued_s = min(queued_s, time.monotonic() - begin_s)
        torch.accelerator.synchronize()
        taken_s = min(taken_s, time.monotonic() - begin_s)
    product_s = max(2 * 256**3 / FLOPS, 3 * 256 * 256 * 4 / BYTES_PER_S) + LAUNCH_S
    addition_s = 3 * 256 * 256 * 4 / BYTES_PER_S + LAUNCH_S
    return 20 * (product_s + addition_s), taken_s, queued_s


def test_a_chain_takes_what_the_roofline_says(pool: Pool) -> None:
    ((computed_s, taken_s, queued_s),) = pool.run(a_chain, 1)
    assert taken_s == pytest.approx(computed_s, rel=0.03)
    assert queued_s < computed_s  # the host ran ahead


def copies(rank: int, world_size: int) -> None:
    card = card_of(flops=1e9, link=pcie(0.1))
    clock = card.clock
    x = torch.ones(100, 1000, device="rehearsal")
    w = torch.ones(1000, 1000, device="rehearsal")
    pinned = torch.ones(1_000_000).pin_memory()
    compute_s, copy_s = 2 * 100 * 1000 * 1000 / 1e9, 1e-5 + 4e6 / 0.1e9

    def seconds(work) -> float:
        torch.accelerator.synchronize()
        start_s = clock.host_s
        work()
        torch.accelerator.synchronize()
        return clock.host_s - start_s

    def one_after_another() -> None:
        _ = x @ w
        pinned.to("rehearsal", non_blocking=True)

    def beside() -> None:
        _ = x @ w
        with torch.Stream("rehearsal"):
            pinned.to("rehearsal", non_blocking=True)

    assert abs(seconds(one_after_another) / (compute_s + copy_s) - 1) < 0.02
    assert abs(seconds(beside) / max(compute_s, copy_s) - 1) < 0.02

    def item_in_the_loop() -> None:
        for _ in range(3):
            with torch.Stream("rehearsal"):
                moved = pinned.to("rehearsal", non_blocking=True)
            (x @ w).sum().item()
            assert moved is not None

    def no_item() -> None:
        for _ in range(3):
            with torch.Stream("rehearsal"):
                pinned.to("rehearsal", non_blocking=True)
            (x @ w).sum()

    assert seconds(no_item) < 3 * compute_s + 0.05 and seconds(item_in_the_loop) < 3 * compute_s + 0.1
    begin_s = clock.host_s
    torch.ones(1_000_000).to("rehearsal")  # not pinned: the host waits
    assert clock.host_s - begin_s > 0.9 * copy_s


def test_copies_take_the_links_time_and_overlap_on_a_stream_of_their_own(pool: Pool) -> None:
    pool.run(copies, 1)


def early(rank: int, world_size: int) -> None:
    card_of(link=pcie(0.1))
    pinned = torch.ones(100_000).pin_memory()
    moved = pinned.to("rehearsal", non_blocking=True)
    pinned.fill_(2)
    raises(RuntimeError, "written while its copy", lambda: moved.sum())
    moved = pinned.to("rehearsal", non_blocking=True)
    torch.accelerator.synchronize()
    pinned.fill_(3)
    assert moved.sum().item() == 200_000
    # An event recorded after the copy is enough.
    moved = pinned.to("rehearsal", non_blocking=True)
    event = torch.Event("rehearsal")
    event.record()
    event.synchronize()
    pinned.fill_(4)
    assert moved[0].item() == 3
    # The other way round: what is read too early is not a number.
    host = moved.to("cpu", non_blocking=True)
    assert host.isnan().all()
    torch.accelerator.synchronize()
    assert (host == 3).all()
    target = torch.zeros(100_000, dtype=torch.int64).pin_memory()
    target.copy_(moved.long(), non_blocking=True)
    assert target[0].item() == torch.iinfo(torch.int64).max
    torch.accelerator.current_stream().synchronize()
    assert target[0].item() == 3


def test_a_buffer_that_is_used_too_early_shows(pool: Pool) -> None:
    pool.run(early, 1)


def loaded(rank: int, world_size: int, busy: bool) -> float:
    """Seconds of a training step on the device's clock; `busy` with threads that hold the interpreter."""
    import threading

    from evener.rehearsal.device.clock import Clock
    from evener.rehearsal.device.driver import CardDriver

    card = card_of(flops=2e9, bytes_per_s=2e9, launch_s=1e-4, clock=Clock(host_counts=False))
    driver = CardDriver(card)
    model = nn.Sequential(nn.Linear(128, 256), nn.Tanh(), nn.Linear(256, 8)).to("rehearsal")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(64, 128, device="rehearsal")
    stop = False

    def spin() -> None:
        while not stop:
            sum(range(1000))

    threads = [threading.Thread(target=spin, daemon=True) for _ in range(2 if busy else 0)]
    for thread in threads:
        thread.start()
    for _ in range(2):
        loss = driver.run("0F0", lambda: model(x).square().mean())
        driver.run("0B0", lambda loss=loss: loss.backward())
        driver.run("STEP", optimizer.step)
    start_s = driver.now()
    for _ in range(10):
        loss = driver.run("0F0", lambda: model(x).square().mean())
        driver.run("0B0", lambda loss=loss: loss.backward())
        driver.run("STEP", optimizer.step)
    stop = True
    return (driver.now() - start_s) / 10


def test_an_idle_and_a_loaded_machine_rehearse_the_same_step(pool: Pool) -> None:
    ((idle_s,), (busy_s,)) = (pool.run(loaded, 1, busy) for busy in (False, True))
    assert busy_s == pytest.approx(idle_s, rel=0.03)
