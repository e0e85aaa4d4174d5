"""When a running job saves: by a rule, at boundaries on which all devices agree without waiting.

    leader      boundary 19: "save at 20"   boundary 20: copy, write │ all shards there: manifest, rename
    followers                               boundary 20: copy, write │ tell the leader: file, size, checksum

The leader announces a checkpoint one boundary ahead, before it takes part in the step between: so every
device finds the word when it gets there. While one is being written, none is announced.

Hosts that take steps by themselves may get there before the leader: they wait for its word, yes or no, at the
steps of the rule. By the clock there are no such steps.

A run that is ended early (Ctrl-C) is asked for one more: everybody looks for that about once a second, at
boundaries that all know by the plan. At each it would cost a step the way to the store and back.
"""

import time
from collections import deque
from pathlib import Path

from torch import Tensor

from evener.core.words import counted
from evener.errors import UsageError
from evener.runtime.checkpoints.folder import Checkpoint
from evener.session.checkpoints.save_rule import Rule
from evener.session.checkpoints.saver import Saver
from evener.session.checkpoints.state import JobState
from evener.session.loop.steps import Steps
from evener.session.meeting import Meeting

MAY_ASK, ANSWERS, ASKED, ANSWERED = "may ask to save", "saves when asked", "is to save", "has saved"
"""What whoever started the job puts before all else, if it may ask for one more checkpoint; the leader, once
the steps look for that; the former when it asks; the latter when that is done, or could not be."""

LOOK_S, MOST_STEPS = 1.0, 32
"""Everybody looks for that once in so many seconds by the plan, and in so many steps at most."""


class Checkpointing:
    """Saves `steps` by `rule`; made by all devices of the plan together, again after each change of devices.

    `meeting` is then another one, and `job` always the same: where one more checkpoint is asked for, if that
    may be; None if it may not. `failures` has why earlier ones of this process failed, and grows.
    `at_boundary` is for `Steps`. UsageError for a rule by the clock where hosts take steps by themselves.
    """

    def __init__(
        self,
        rule: Rule,
        run_dir: str | Path,
        meeting: Meeting,
        steps: Steps,
        *,
        job: Meeting | None = None,
        failures: list[str] | None = None,
    ) -> None:
        if steps.meetings and rule.steps is None:
            raise UsageError(
                "hosts that take steps by themselves cannot agree by the clock on when to save",
                remedy="checkpoints every so many steps: --checkpoint-every 200",
            )
        self._rule, self._meeting, self._steps = rule, meeting, steps
        self._news: deque[str] = deque()  # filled by the writing thread
        self.saver = Saver(JobState(steps), Path(run_dir), meeting, rule.keep, self._news.append)
        if failures is not None:
            self.saver.failures = failures
        self._announced = -1
        self._boundary = self._saved = -1
        self._job, self._asked_for, self._left_out = job, -1, -1
        told = steps.plan.prediction  # of the plan that this began with: the same number on all devices
        self._look_every = min(MOST_STEPS, max(1, int(LOOK_S / told.step_s))) if told else 1
        if job is not None and self.saver.leads:
            job.put(ANSWERS, True)
        self._due_s = time.monotonic()
        extra = [n for n, x in steps.recipe.model.state_dict().items() if not isinstance(x, Tensor)]
        if self.saver.leads and extra:
            self._news.append(f"no checkpoint holds what the model keeps beside tensors: {', '.join(extra)}")

    def at_boundary(self, number: int) -> None:
        """All devices are between two steps, about to take step `number`."""
        if number == self._boundary:
            return  # a step that is redone
        is_first, self._boundary = self._boundary < 0, number
        if number == self._left_out:  # where the run ends it is saved all the same
            self._news.append(f"step {number}: no checkpoint, the one before is still being written")
        self._pass_on_news()
        if not is_first and self._is_agreed(number):  # before the first one nobody has announced any
            self._save()
        if self.saver.leads:
            self._answer()
            self._announce(number + 1)

    def finish(self) -> None:
        """Save where the run has ended, unless that was done, and wait until it is on disk."""
        self.saver.join()
        if self._saved != self._steps.number:
            self._save()
            self.saver.join()
        saver = self.saver
        if saver.leads and saver.newest:
            average = sum(saver.seconds) / len(saver.seconds)
            self._news.append(
                f"{counted(len(saver.seconds), 'checkpoint')} in {saver.folder}, the last "
                f"{Checkpoint(saver.newest).label}: {average:.2f} s each beside the training, which waited "
                f"{saver.waited_s:.2f} s in all"
            )
        if self.failed:
            self._news.append(self.failed)
        self._pass_on_news()

    @property
    def failed(self) -> str:
        """How many checkpoints could not be saved, and why; empty for none."""
        if not self.saver.failures:
            return ""
        failed = counted(len(self.saver.failures), "checkpoint")
        return f"{failed} could not be saved in {self.saver.folder}, the last: {self.saver.failures[-1]}"

    def settle(self) -> None:
        """Return when nothing reads parameters or optimiser state any more: before others change them."""
        self.saver.settle()

    def close(self) -> None:
        """Let go; a checkpoint that is not complete by now is given up."""
        self.saver.close()
        self._pass_on_news()

    def _pass_on_news(self) -> None:
        while self._news:
            self._steps.decisions.append(self._news.popleft())

    def _save(self) -> None:
        self._saved = self._steps.number
        self.saver.begin(self._steps.samples_seen)

    def _answer(self) -> None:
        """Tell who asked for one more that it is on disk, or has failed."""
        if self._job is not None and 0 <= self._asked_for < self._boundary and not self.saver.is_busy:
            self._job.put(ANSWERED, True)

    def _is_agreed(self, number: int) -> bool:
        if self.saver.leads:
            return number == self._announced
        by_steps = self._rule.steps is not None
        if by_steps and not self._rule.is_due(number, 0.0) and self._asks(number) is None:
            return False
        key = self.saver.key(f"save/{number}")
        if self._steps.meetings:
            return self._meeting.get(key, bool)
        return self._meeting.store.check([key])

    def _asks(self, number: int) -> Meeting | None:
        """Where one more may be asked for before step `number`; None where nobody looks."""
        return self._job if number % self._look_every == 0 else None

    def _announce(self, number: int) -> None:
        job = self._asks(number) if self._asked_for < 0 else None
        asked = job is not None and job.has(ASKED)
        if asked and not self.saver.is_busy:
            self._asked_for = number
        elif not self._rule.is_due(number, time.monotonic() - self._due_s):
            return
        self._due_s = time.monotonic()
        key = self.saver.key(f"save/{number}")
        if self.saver.is_busy:
            self._left_out = number
            if self._steps.meetings:
                self._meeting.put(key, False)
            return
        self._announced = number
        self._meeting.put(key, True)
