"""The live view: a table on a terminal, plain lines elsewhere; time is an argument."""

import re
from io import StringIO

import pytest
from rich.console import Console

from evener.core.plan import Plan
from evener.report.live import RECENT_STEPS, LiveView
from tests.unit.report.worked import PLAN, pipeline, record


class Clock:
    """A clock that goes on only when told."""

    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


def view_on(*, terminal, total_steps=100, plan=PLAN):
    clock, out = Clock(), StringIO()
    console = Console(file=out, force_terminal=terminal, width=100, height=30, color_system=None)
    return LiveView(plan, total_steps, clock, console), clock, out


def plain_lines(steps, *, seconds_between, **given):
    view, clock, out = view_on(terminal=False, **given)
    with view:
        for step in steps:
            view.update(record(step) if isinstance(step, int) else step)
            clock.now_s += seconds_between
    return out.getvalue().splitlines()


def test_the_plain_line():
    (line,) = plain_lines([39], seconds_between=1)
    assert line == (
        "step 40/100, loss 1.6000, 11.67 samples/s, 1.2 s a step, 1:12 left, "
        "busy: lab/a 87.5 %, lab/b 91.7 %, far/c 96.7 %"
    )


def test_plain_lines_come_every_ten_seconds_and_at_the_last_step():
    lines = plain_lines(range(30), seconds_between=1, total_steps=30)
    assert [line.split(",")[0] for line in lines] == ["step 1/30", "step 11/30", "step 21/30", "step 30/30"]


def test_a_skipped_step_is_told_at_once_with_its_reason():
    bad = record(2, loss=None, skipped="the loss is NaN on lab/b")
    lines = plain_lines([0, 1, bad, 3], seconds_between=1)
    assert len(lines) == 2
    assert "loss not finite" in lines[1]
    assert lines[1].endswith("1 skipped, the latest: the loss is NaN on lab/b")


def test_skipped_steps_take_time_and_give_no_samples():
    bad = record(1, skipped="no memory on lab/a")
    assert f"{14 / 2.4:.4g} samples/s" in plain_lines([record(0), bad], seconds_between=1)[1]


def test_rates_are_those_of_recent_steps():
    slow = [record(step, 100.0) for step in range(5)]
    fast = [record(5 + step, 1.0) for step in range(RECENT_STEPS)]
    lines = plain_lines([*slow, *fast], seconds_between=1, total_steps=5 + RECENT_STEPS)
    assert "14 samples/s, 1 s a step, 0:00 left" in lines[-1]


def test_many_devices_are_one_range():
    plan = Plan(global_batch=10, pipelines=tuple(pipeline(f"lab/d{i}", 1, 1) for i in range(10)))
    seconds = {f"lab/d{i}": {"compute": 0.06 * (i + 1)} for i in range(10)}
    (line,) = plain_lines([record(0, 1.2, samples=10, seconds=seconds)], seconds_between=1, plan=plan)
    assert line.endswith("busy: 10 devices 5.0 % to 50.0 %")


def screen(text):
    """The text without control sequences."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_a_terminal_gets_shares_busy_times_and_progress():
    view, _, out = view_on(terminal=True)
    with view:
        view.update(record(39))
    text = screen(out.getvalue())
    assert re.search(r"lab/a +8 +57\.1 % +87\.5 %", text)
    assert re.search(r"far/c +2 +14\.3 % +96\.7 %", text)
    assert "step 40/100, loss 1.6000, 11.67 samples/s" in text
    assert "━" in text


def test_a_terminal_is_redrawn_four_times_a_second_and_shows_the_last_state():
    view, clock, out = view_on(terminal=True)
    with view:
        for step in range(20):
            view.update(record(step))
            clock.now_s += 0.0625
        drawn = screen(out.getvalue())
        assert drawn.count("device") == 5
        assert "step 17/100" in drawn
        assert "step 18/100" not in drawn
    assert "step 20/100" in screen(out.getvalue())


@pytest.mark.parametrize("terminal", [True, False])
def test_a_run_that_fails_before_its_first_step_leaves_nothing_behind(terminal):
    view, _, out = view_on(terminal=terminal)
    with pytest.raises(RuntimeError), view:
        raise RuntimeError
    assert screen(out.getvalue()).strip() == ""
