"""A view of a run while it runs: a table on a terminal, a plain line now and then elsewhere."""

import sys
from collections import deque
from collections.abc import Callable
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from evener.core.plan import Plan
from evener.core.records import StepRecord
from evener.report.lookups import hits_text, ids_per_s, lookups_of
from evener.report.tables import clock_time, duration, percent, table

REDRAW_S = 0.25
PLAIN_S = 10.0
RECENT_STEPS = 20
MOST_DEVICES_IN_A_LINE = 8


class LiveView:
    """Shows loss, samples/s, each device's share and busy time, progress and time left; a context manager.

    `clock` gives seconds and `console` decides the form: a terminal gets a table, redrawn at most every
    `REDRAW_S`; anything else one plain line for the first step, the last, each skipped one, and every
    `PLAIN_S`. Rates are those of the last `RECENT_STEPS` steps. No thread runs behind it.
    """

    def __init__(self, plan: Plan, total_steps: int, clock: Callable[[], float], console: Console) -> None:
        self.total_steps = total_steps
        self._samples = plan.samples_by_device()
        self._global_batch = plan.global_batch
        self._clock, self._console = clock, console
        self._every_s = REDRAW_S if console.is_terminal else PLAIN_S
        self._shown_s: float | None = None
        self._recent: deque[StepRecord] = deque(maxlen=RECENT_STEPS)
        self._skipped = 0
        # What the user's own code prints goes above the table; a piped stdout stays what it is.
        self._live = Live(console=console, auto_refresh=False, redirect_stdout=sys.stdout.isatty())

    def __enter__(self) -> "LiveView":
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            if self._recent:
                self._live.update(self._table())
            self._live.stop()

    def update(self, record: StepRecord) -> None:
        """Take in `record` and show it if it is time to."""
        self._recent.append(record)
        self._skipped += bool(record.skipped)
        now = self._clock()
        due = self._shown_s is None or now - self._shown_s >= self._every_s
        if not (due or record.skipped or record.step + 1 >= self.total_steps):
            return
        self._shown_s = now
        if self._console.is_terminal:
            self._live.update(self._table(), refresh=True)
        else:
            self._console.print(self.line(), soft_wrap=True, markup=False, highlight=False)

    def say(self, sentence: str) -> None:
        """A line of its own, above the table where there is one."""
        self._console.print(sentence, soft_wrap=True, markup=False, highlight=False)

    def line(self) -> str:
        """The state in one line. Example: "step 40/100, loss 2.91, 11.7 samples/s, 1:12 left, busy: ..."."""
        busy = self._busy()
        if len(busy) > MOST_DEVICES_IN_A_LINE:
            told = f"{len(busy)} devices {percent(min(busy.values()))} to {percent(max(busy.values()))}"
        else:
            told = ", ".join(f"{name} {percent(part)}" for name, part in busy.items())
        return ", ".join([*self._figures(), f"busy: {told}"]) + self._skips()

    def _figures(self) -> list[str]:
        last = self._recent[-1]
        loss = "loss not finite" if last.loss is None else f"loss {last.loss:.4f}"
        return [
            f"step {last.step + 1}/{self.total_steps}",
            loss,
            f"{self._rate():.4g} samples/s",
            f"{duration(self._step_s())} a step",
            f"{clock_time(self._left_s())} left",
            *self._lookups(),
        ]

    def _lookups(self) -> list[str]:
        """Ids a second that the leading device looks up, and where the rows of tiered tables were."""
        tables = lookups_of(self._recent)
        if not tables:
            return []
        rate = ids_per_s(tables.values(), sum(r.step_s for r in self._recent))
        hits = [f"{name} {hits_text(told)}" for name, told in tables.items() if told.found_in]
        return [f"{rate:,.0f} ids/s looked up", *hits]

    def _skips(self) -> str:
        reason = next((r.skipped for r in reversed(self._recent) if r.skipped), "")
        latest = f", the latest: {reason}" if reason else ""
        return f"; {self._skipped} skipped{latest}" if self._skipped else ""

    def _rate(self) -> float:
        """Samples of committed steps over the time of all: skipped steps take time and give nothing."""
        return sum(r.samples for r in self._recent if not r.skipped) / sum(r.step_s for r in self._recent)

    def _step_s(self) -> float:
        return sum(r.step_s for r in self._recent) / len(self._recent)

    def _left_s(self) -> float:
        return max(0, self.total_steps - self._recent[-1].step - 1) * self._step_s()

    def _busy(self) -> dict[str, float]:
        """Part of the recent time that each device of the plan spent in compute and optimizer."""
        total_s = sum(r.step_s for r in self._recent)
        busy = {}
        for name in self._samples:
            seconds = [r.seconds.get(name, {}) for r in self._recent]
            busy[name] = sum(x.get("compute", 0.0) + x.get("optimizer", 0.0) for x in seconds) / total_s
        return busy

    def _table(self) -> Group:
        busy = self._busy()
        rows = [
            (name, str(samples), percent(samples / self._global_batch), percent(busy[name]))
            for name, samples in self._samples.items()
        ]
        done = min(self._recent[-1].step + 1, self.total_steps)
        progress = Table.grid(padding=(0, 2, 0, 0))
        progress.add_row(
            ProgressBar(total=self.total_steps, completed=done, width=30),
            Text(", ".join(self._figures()) + self._skips()),
        )
        return Group(table(("device", "samples", "part", "busy"), rows), progress)
