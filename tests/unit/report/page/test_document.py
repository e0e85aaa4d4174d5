"""The figures of the page are those of the run."""

import dataclasses

import pytest
from msgspec.structs import replace

from evener.core.figures import Figure
from evener.core.plan import Pipeline, Share, Stage
from evener.core.trace import CAUSES, Span, Trace
from evener.report.page import timeline as drawing
from evener.report.page.against import comparison
from evener.report.page.build import document
from evener.report.page.curves import thinned
from evener.report.page.files import read_run
from evener.report.page.timeline import host_shifts, lanes_of
from tests.unit.report.page.runs import fleet, run_folder, spans
from tests.unit.report.worked import LEFT_OUT_REASON, OWNED, PLAN, RECORDS, record


@pytest.fixture
def shown(tmp_path):
    return document(read_run(run_folder(tmp_path / "run")))


def test_every_figure_at_the_top_has_a_value_a_unit_where_it_has_one_and_a_source(shown) -> None:
    stats = {s.key: s for s in shown.stats}
    assert stats["step_s"].value == 1.2 and (stats["step_s"].text, stats["step_s"].unit) == ("1.2", "s")
    assert stats["samples_per_s"].value == pytest.approx(14 / 1.2)
    assert stats["efficiency"].value == pytest.approx(14 / 1.2 / 14.25)
    assert stats["loss"].value == RECORDS[-1].loss and stats["heldout_loss"].value == 2.5
    assert all(s.source for s in shown.stats)
    assert "measured" in stats["step_s"].source and "fitted" in stats["predicted_step_s"].source


def test_the_causes_of_the_lost_time_add_up_to_the_gap(shown) -> None:
    job = shown.lost.table.rows[-1]
    assert job[0].text == "the job"
    causes = [c.value for c in job[1:-1]]
    assert sum(causes) == pytest.approx(shown.lost.gap_s) and job[-1].value == pytest.approx(shown.lost.gap_s)
    assert shown.lost.gap_s == pytest.approx(1.2 - 14 / 14.25)
    for row in shown.lost.table.rows:
        assert sum(c.value for c in row[1:-1]) == pytest.approx(row[-1].value)


def test_predicted_stands_beside_measured(shown) -> None:
    pair = next(p for p in shown.beside.pairs if (p.device, p.cause) == ("lab/b", "compute"))
    assert (pair.predicted_s, pair.measured_s) == (1.02, pytest.approx(1.05))
    assert "not predicted: far/c" in shown.beside.sentence


def test_every_decision_comes_with_its_reason_word_for_word(shown) -> None:
    said = {(d.kind, d.subject): d for d in shown.said}
    assert said["left out", "lab/old"].reason == LEFT_OUT_REASON
    assert any(d.kind == "plan" and d.reason == PLAN.why for d in shown.said)
    assert any(d.reason == "after step 3: lab/a turned out faster" for d in shown.said)
    assert all(d.source for d in shown.said)


def test_the_picture_says_who_holds_what_and_how_much_memory(shown) -> None:
    first = shown.plan.pipelines[0]
    assert (first.samples, first.part, first.micro_batches) == (8, pytest.approx(8 / 14), "2 × 4")
    assert first.stages[0].holders[0].devices == ("lab/a",) and first.stages[0].layers == ("embed", "head")
    held = shown.plan.memory[0]
    assert (held.predicted, held.measured, held.limit) == (2e9, 1e9, 8e9)
    assert (held.predicted_source, held.limit_source) == ("fitted", "table")
    assert shown.plan.table.rows[-1][2].text == "left out"


def test_the_picture_says_who_keeps_which_part_of_the_state(tmp_path) -> None:
    shown = document(read_run(run_folder(tmp_path / "r", plan=OWNED, finished=False))).plan
    assert shown.headline.endswith("gradients and the optimiser's state in unequal parts")
    titles = [c.title for c in shown.table.columns]
    row = {c.text: r for r in shown.table.rows for c in r[:1]}["far/c"]
    assert row[titles.index("state")].value == pytest.approx(0.2)
    assert row[titles.index("kept")].value == 240_000_000
    assert shown.pipelines[2].micro_batches == "none" and len(row) == len(titles)


def test_stages_are_as_wide_as_their_layers_where_nothing_else_is_known(tmp_path) -> None:
    stages = (
        Stage(layers=("embed", "a", "b"), shares=(Share(devices=("lab/a",), samples=2),)),
        Stage(
            layers=("head",),
            shares=(Share(devices=("lab/b",), samples=1), Share(devices=("far/c",), samples=1)),
        ),
    )
    plan = replace(PLAN, global_batch=4, pipelines=(Pipeline(samples=4, micro_batch=2, stages=stages),))
    boxes = document(read_run(run_folder(tmp_path / "r", plan=plan, finished=False))).plan.pipelines[0].stages
    assert [b.weight for b in boxes] == [3, 1] and boxes[0].title == "embed … b"
    assert [h.devices for h in boxes[1].holders] == [("lab/b",), ("far/c",)]


def test_the_timeline_holds_every_span_of_the_trace(shown) -> None:
    lanes = shown.timeline.traces[0]
    assert len(lanes.start_ns) == len(spans()) and lanes.steps == (0, 1, 2)
    assert list(lanes.start_ns) == sorted(lanes.start_ns)
    wanted, drawn = dict.fromkeys(CAUSES, 0.0), dict.fromkeys(CAUSES, 0.0)
    for s in spans():
        if (s.step, s.device) == (1, "lab/b"):
            wanted[s.cause] += s.end_s - s.start_s
    for step, device, cause, length in zip(
        lanes.step, lanes.device, lanes.cause, lanes.length_ns, strict=True
    ):
        if (step, lanes.devices[device]) == (1, "lab/b"):
            drawn[CAUSES[cause]] += length / 1e9
    assert drawn == pytest.approx(wanted, abs=1e-8)


def span(device: str, start: float, end: float, step: int = 0, cause: str = "compute") -> Span:
    return Span(device=device, action="0F0", start_s=start, end_s=end, cause=cause, step=step)


def test_hosts_are_brought_to_one_clock_by_their_reductions() -> None:
    found = [span("a/x", n, n + 1.0, n, "reduce") for n in range(4)]
    found += [span("b/y", n + 500.0, n + 501.0, n, "reduce") for n in range(4)]
    assert host_shifts(found) == {"a": 0.0, "b": pytest.approx(-500)}
    notes: list[str] = []
    lanes = lanes_of(Trace(source="measured", spans=tuple(found), steps=4), notes)
    assert max(lanes.start_ns) == 3e9 and any("clock of b" in n for n in notes)


def test_odd_spans_are_left_out_and_told() -> None:
    notes: list[str] = []
    odd = (span("a/x", 2, 1), span("a/x", 0, 1e30), span("a/x", 1e300, 1e300), span("a/x", 0, 1))
    assert len(lanes_of(Trace(source="measured", spans=odd), notes).start_ns) == 1
    assert notes == ["3 spans of the measured trace end before they begin or last for days: left out"]


def test_of_too_many_spans_the_newest_are_drawn(monkeypatch) -> None:
    monkeypatch.setattr(drawing, "MOST_SPANS", 5)
    notes: list[str] = []
    lanes = lanes_of(Trace(source="measured", spans=tuple(span("a/x", n, n + 1, n) for n in range(9))), notes)
    assert lanes.steps == (4, 5, 6, 7, 8) and "the newest 5 of 9" in notes[0]


def test_curves_are_thinned_to_means() -> None:
    records = [record(i, 1.0 + i, loss=4.0 - i) for i in range(3)]
    assert thinned(records, 2) == ((1, 2), (3.5, 2.0), (1.5, 3.0), 2)
    gap = [record(0), record(1, loss=None)]
    assert thinned(gap)[1] == (5.5, None)


def test_a_run_that_goes_on_is_told_by_its_records(tmp_path) -> None:
    run = read_run(run_folder(tmp_path / "run", finished=False))
    live = document(run, live=True)
    assert live.progress.done == 10 and live.progress.total == 20 and live.progress.left_s > 0
    assert ("plain", "running") in live.badges and live.lost is not None
    assert document(run).badges[0][0] == "bad", "a report of a run without an end must say so"


def test_cost_follows_from_prices_and_measured_speed(tmp_path) -> None:
    path = run_folder(tmp_path / "run")
    priced = fleet(
        price_per_hour=Figure(value=0.36, source="assumed"), watts=Figure(value=100, source="table")
    )
    run = dataclasses.replace(read_run(path), fleet=priced)
    table = document(run).cost
    job = table.rows[-1]
    rate = 14 / 1.2
    assert job[1].value == pytest.approx(3 * 0.36)
    assert job[3].value == pytest.approx(3 * 0.36 / 3600 / rate * 1e6)
    assert job[4].value == pytest.approx(300 / 3.6e6 / rate * 1e6)
    assert document(read_run(path)).cost is None and "no price" in document(read_run(path)).cost_note


def test_two_runs_lie_side_by_side(tmp_path) -> None:
    slow = tuple(record(n, 9.0 if n < 3 else 1.5) for n in range(10))
    ours, theirs = run_folder(tmp_path / "ours"), run_folder(tmp_path / "theirs", records=slow)
    found = comparison(read_run(ours), read_run(theirs))
    rows = {row[0].text: row for row in found.table.rows}
    assert (rows["Step"][1].value, rows["Step"][2].value) == (1.2, 1.5)
    assert rows["Step"][3].value == pytest.approx(0.25)
    lost = found.lost.rows[-1]
    assert lost[3].value == pytest.approx(0.3) and found.notes == ()
