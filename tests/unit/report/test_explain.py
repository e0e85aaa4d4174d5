"""evener explain: what it reads, and the sentences."""

import json

import pytest

from evener.cli import main as cli
from evener.core.files import write_bytes
from evener.core.records import StepRecord
from evener.core.trace import Span, Trace
from evener.errors import UsageError
from evener.report.explain import BETWEEN, INSIDE, explanation, exposed_by_group, recorded
from evener.report.page.files import read_run
from evener.report.profiled import merged
from tests.unit.report.page.runs import run_folder
from tests.unit.report.test_profiled import GPU


def test_a_profiled_run_is_explained_by_its_profile(tmp_path) -> None:
    path = run_folder(tmp_path / "run")
    write_bytes(path / "profiled-step.json", merged((GPU,)))
    found = explanation(path, read_run(path))
    assert found.source == "profiled by torch in step 4" and found.uses[0].busy == pytest.approx(0.6)
    text = found.text()
    assert "lab/a" in text and "60.0 %" in text and "30.0 %" in text
    assert any("lost in a typical step: 217.5 ms of 1.2 s" in s for s in found.sentences)


def test_without_a_profile_the_trace_tells(tmp_path) -> None:
    path = run_folder(tmp_path / "run")
    found = explanation(path, read_run(path))
    assert "mean of 3 steps of trace.json, measured" in found.text()
    used = found.uses[0]
    assert used.step_s == pytest.approx(1.2) and used.busy == pytest.approx(1.08 / 1.2)
    assert used.communication == used.exposed == pytest.approx(0.1 / 1.2)


def test_a_run_that_was_stopped_is_explained_by_its_steps(tmp_path) -> None:
    """Ctrl-C leaves no trace and no report: it was said that such a run holds nothing."""
    path = run_folder(tmp_path / "run", finished=False)
    found = explanation(path, read_run(path))
    assert "of metrics.jsonl, measured" in found.source and "was stopped" in found.text()
    assert found.uses[0].device == "lab/a" and 0 < found.uses[0].busy < 1
    assert any("lost in a typical step" in s for s in found.sentences)


def test_steps_count_by_their_seconds() -> None:
    """Worked by hand: 1 s and 3 s, 3.6 s of the 4 computed, 0.2 waited; the rest is overhead."""
    records = [
        StepRecord(step=n, samples=4, step_s=s, seconds={"a/0": {"compute": 0.9 * s, "wait": 0.05 * s}})
        for n, s in enumerate((1.0, 3.0))
    ]
    (used,) = recorded(records)
    assert (used.step_s, used.busy, used.exposed) == pytest.approx((2.0, 0.9, 0.05))


def test_a_run_without_a_step_says_what_would_work(tmp_path) -> None:
    path = run_folder(tmp_path / "run", finished=False)
    (path / "metrics.jsonl").unlink()
    with pytest.raises(UsageError, match="holds no step"):
        explanation(path, read_run(path))


def test_the_verb_speaks_json(tmp_path, capsys) -> None:
    path = run_folder(tmp_path / "run")
    with pytest.raises(SystemExit) as end:
        cli.main(["explain", str(path), "--json"])
    assert end.value.code == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [d["device"] for d in told["devices"]] == ["lab/a", "lab/b", "far/c"]


def test_what_nothing_hid_is_told_by_group() -> None:
    """Of the device that waits longest between groups, the mean over steps; a ring says nothing."""

    def spans(device: str, inside_s: float, between_s: float) -> list[Span]:
        parts = ((INSIDE, inside_s), (BETWEEN, between_s))
        return [
            Span(device=device, action=action, start_s=n, end_s=n + length, cause="reduce", step=n)
            for n in (0, 1)
            for action, length in parts
        ]

    told = exposed_by_group(
        Trace(source="measured", spans=(*spans("a/0", 0.004, 0.310), *spans("b/0", 0.1, 0.2)))
    )
    assert told == ("sums not hidden on a/0: 310 ms a step between groups, 4 ms inside them",)
    ring = Span(device="a/0", action="REDUCE_GRAD", start_s=0.0, end_s=1.0, cause="reduce")
    assert exposed_by_group(Trace(source="measured", spans=(ring,))) == ()
