"""Scripted trouble strikes when the script says, once, and leaves nothing behind."""

import pytest
import torch
from torch import nn

from evener.core.actions import parse_action
from evener.core.faults import parse_faults
from evener.core.fleet import Device, Fleet
from evener.errors import UnknownNameError, UsageError
from evener.session.loop.scripted import OutOfMemoryOnce, Scripted
from evener.session.request import Request

ROW = [parse_action(word) for word in ("0F0", "0B0", "0REDUCE_GRAD", "STEP")]
FLEET = Fleet(devices=(Device(name="lab/a", kind="k"), Device(name="lab/b", kind="k")))


def played(script: str, steps: int) -> list[tuple[str, int, str]]:
    """(fault, step, action before which it struck)."""
    struck: list[tuple[str, int, str]] = []
    waiting, at = list(parse_faults(script).faults), []

    def strike(fault) -> None:
        at.append(str(fault))

    faults = Scripted(waiting, {"slow": strike, "oom": strike}, lambda: None)
    for step in range(steps):
        for action in faults.during(step, ROW, len(ROW)):
            struck += [(fault, step, str(action)) for fault in at]
            at.clear()
    return struck


def test_a_fault_strikes_before_the_first_action_or_when_so_much_of_the_step_is_done():
    assert played("slow lab/a x3 at step 1; oom lab/a at 2.5", 4) == [
        ("slow lab/a x3 at 1", 1, "0F0"),
        ("oom lab/a at 2.5", 2, "0REDUCE_GRAD"),
    ]


def test_a_step_taken_again_is_not_struck_again_also_by_the_next_generation():
    waiting = list(parse_faults("oom lab/a at 1").faults)
    struck: list[str] = []
    for _ in range(2):
        faults = Scripted(waiting, {"oom": lambda fault: struck.append(str(fault))}, lambda: None)
        for _ in range(2):
            list(faults.during(1, ROW, len(ROW)))
    assert struck == ["oom lab/a at 1"] and waiting == []


def test_what_a_run_cannot_play_is_refused_before_the_first_step():
    with pytest.raises(UsageError, match="cannot be played"):
        Scripted(list(parse_faults("join lab/c at 3").faults), {}, lambda: None)


def test_out_of_memory_strikes_one_forward_and_its_hooks_go():
    model = nn.Linear(2, 2)
    once = OutOfMemoryOnce([model])
    (fault,) = parse_faults("oom lab/a at 1").faults
    model(torch.ones(1, 2))
    once.arm(fault)
    with pytest.raises(torch.OutOfMemoryError, match="oom lab/a at 1"):
        model(torch.ones(1, 2))
    model(torch.ones(1, 2))
    once.close()
    assert not model._forward_pre_hooks


def test_faults_need_devices_that_are_there_and_slow_ones_a_rehearsal():
    with pytest.raises(UnknownNameError, match="lab/c"):
        Request(fleet=FLEET, run_dir="", rehearse=True, faults=parse_faults("slow lab/c x2 at 1"))
    with pytest.raises(UsageError, match="paced"):
        Request(fleet=FLEET, run_dir="", faults=parse_faults("slow lab/a x2 at 1"))
    with pytest.raises(UsageError, match="paced"):
        Request(fleet=FLEET, run_dir="", noise=0.5)
    with pytest.raises(UsageError, match="0 or more"):
        Request(fleet=FLEET, run_dir="", rehearse=True, noise=-1.0)
    Request(fleet=FLEET, run_dir="", faults=parse_faults("oom lab/a at 1"))
