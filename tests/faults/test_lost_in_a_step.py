"""A device is lost in the middle of a step: whatever the instant, its own samples alone are taken anew."""

from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from evener.core.fleet import Device, Fleet
from evener.session.journal import Outcome
from evener.session.launching.launch import launch
from tests.faults.jobs import NAMES, SCRIPT, error_of, in_a_row, request_for, split, steps_of
from tests.local.device.test_job import fleet as cards_of

pytestmark = pytest.mark.timeout(120)

TRAP = """
import multiprocessing, os, signal
from evener.runtime import buckets, tally
from evener.session.loop import keeping, unfinished
keeping.worth_copying = lambda copy_s, step_s: ({copies}, "so short a step")
HERE = multiprocessing.current_process().name

def end(device):
    if HERE == device:
        os.kill(os.getpid(), signal.SIGKILL)

lay_out = buckets._lay_out
buckets._lay_out = lambda parameters, ranks, limit, homes: lay_out(parameters, ranks, 200, homes)  # several

def before(owner, name, device, when):
    inner = getattr(owner, name)
    def strike(self, *args, **more):
        if when(self, *args):
            end(device)
        return inner(self, *args, **more)
    setattr(owner, name, strike)
"""
INSTANTS = {
    "when it launches the second bucket": "before(buckets.GradientBuckets, '_launch', 'lab/c',"
    " lambda self, bucket: self._step == 3 and self._next == 1)",
    "when the first sum is there": "wait = buckets.GradientBuckets.wait\n"
    "def one(self):\n"
    "    if self._step == 3 and HERE == 'lab/c':\n"
    "        self._buckets[0].wait()\n"
    "        end('lab/c')\n"
    "    wait(self)\n"
    "buckets.GradientBuckets.wait = one",
    "at the tally": "before(tally.Tally, 'launch', 'lab/c', lambda self, step, share: step == 3)",
}


def run(
    tmp_path: Path,
    trap: str = "",
    *,
    steal: bool = False,
    micro_batch: int = 2,
    copies: bool = True,
    pause_s: float = 0.004,
    fleet: Fleet | None = None,
    **more,
) -> Outcome:
    plan = split(5, 4, 3)
    pipelines = []
    for p in plan.pipelines:
        stages = tuple(
            replace(s, shares=tuple(replace(x, samples=micro_batch) for x in s.shares)) for s in p.stages
        )
        pipelines.append(replace(p, micro_batch=micro_batch, stages=stages))
    request = request_for(tmp_path, replace(plan, pipelines=tuple(pipelines), steal=steal), steps=7, **more)
    if fleet:
        request = replace(request, fleet=fleet, rehearse=True)
    script = Path(request.script)
    dtype, exact, bound = ("float", torch.float32, 1e-6) if fleet else ("double", torch.float64, 1e-12)
    text = SCRIPT.format(dtype=dtype, pause_s=pause_s)
    script.write_text(text + TRAP.replace("{copies}", str(copies)) + trap)
    outcome = launch(request)
    assert error_of(outcome, 7, exact) <= bound
    assert steps_of(outcome) == list(range(7))
    assert outcome.parameters_agree
    return outcome


def told(outcome: Outcome, generation: int) -> str:
    return next(s for s in outcome.decisions if s.startswith(f"generation {generation}, "))


def test_in_the_middle_of_its_samples(tmp_path) -> None:
    outcome = run(tmp_path, faults="leave lab/c at 3.5")
    assert "9 of 12 samples of step 3 are kept (lab/a 5, lab/b 4), the other 3 taken anew" in told(outcome, 2)


@pytest.mark.parametrize("instant", INSTANTS)
def test_in_the_sums(tmp_path, instant: str) -> None:
    outcome = run(tmp_path, INSTANTS[instant])
    assert "9 of 12 samples of step 3 are kept (lab/a 5, lab/b 4), the other 3 taken anew" in told(outcome, 2)


def test_without_copies_what_is_noticed_before_the_sums_is_kept_all_the_same(tmp_path) -> None:
    outcome = run(tmp_path, copies=False, pause_s=0.15, faults="leave lab/c at 3")
    assert "9 of 12 samples of step 3 are kept (lab/a 5, lab/b 4), the other 3 taken anew" in told(outcome, 2)


def test_without_copies_what_is_noticed_in_the_sums_is_taken_whole_and_told(tmp_path) -> None:
    sentence = told(run(tmp_path, INSTANTS["at the tally"], copies=False), 2)
    assert "step 3 is taken anew whole: " in sentence and "(so short a step)" in sentence


def test_a_second_device_in_what_is_taken_anew_takes_along_what_it_kept(tmp_path) -> None:
    trap = "before(unfinished.Unfinished, 'fetch', 'lab/b', lambda self, *args: True)"
    outcome = run(tmp_path, trap, faults="leave lab/c at 3")
    assert "9 of 12 samples of step 3 are kept (lab/a 5, lab/b 4)" in told(outcome, 2)
    assert "7 of 12 samples of step 3 are kept (lab/a 7), the other 5 taken anew (lab/a 5)" in told(
        outcome, 3
    )


def test_a_second_device_before_anything_is_taken_anew(tmp_path) -> None:
    """Story: the sums were handed to a generation that never took a step."""
    trap = (
        "from evener.session.members import form\n"
        "before(form.Steps, '__init__', 'lab/b', lambda self, seat, *more: len(seat.plan.devices) == 2)"
    )
    outcome = run(tmp_path, trap, faults="leave lab/c at 3")
    assert "5 of 12 samples of step 3 are kept (lab/a 5), the other 7 taken anew (lab/a 7)" in told(
        outcome, 3
    )


def test_with_tickets_the_holes_that_a_lost_device_leaves_are_filled(tmp_path) -> None:
    outcome = run(tmp_path, faults="leave lab/c at 3.5", steal=True, micro_batch=1)
    assert " of 12 samples of step 3 are kept (" in told(outcome, 2)


def test_nobody_is_lost_and_all_that_was_done_counts(tmp_path) -> None:
    """Story: a device was silent for a moment only, and the same devices meet again."""
    trap = (
        "from evener.errors import PeerLostError\n"
        "struck = []\n"
        "launch = tally.Tally.launch\n"
        "def fail(self, step, share):\n"
        "    if step == 3 and HERE == 'lab/a' and not struck:\n"
        "        struck.append(step)\n"
        "        raise PeerLostError('a cable was loose')\n"
        "    return launch(self, step, share)\n"
        "tally.Tally.launch = fail"
    )
    sentence = told(run(tmp_path, trap), 2)
    assert "nobody is lost, the same devices meet again" in sentence
    assert sentence.endswith("12 of 12 samples of step 3 are kept (lab/a 5, lab/b 4, lab/c 3)")


@pytest.mark.parametrize("instant", INSTANTS)
def test_on_accelerators_the_buckets_are_the_copies_until_a_sum_has_come_back(tmp_path, instant: str) -> None:
    cards = cards_of(*(Device(name=name, kind="RTX 3060") for name in NAMES))
    sentence = told(run(tmp_path, INSTANTS[instant], fleet=cards), 2)
    if instant == "when it launches the second bucket":
        assert "9 of 12 samples of step 3 are kept (lab/a 5, lab/b 4), the other 3 taken anew" in sentence
    else:
        assert "step 3 is taken anew whole: lab/a has no gradients of its own any more" in sentence


def test_a_plan_that_cuts_the_model_takes_the_step_whole_and_says_so(tmp_path) -> None:
    request = request_for(tmp_path, in_a_row("0", "1", "2"), steps=6, faults="leave lab/b at 3.5")
    outcome = launch(request)
    assert error_of(outcome, 6) <= 1e-12
    assert "step 3 is taken anew whole: the plan cuts the model" in told(outcome, 2)
