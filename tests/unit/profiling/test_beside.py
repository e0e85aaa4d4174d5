"""What a run does beside its actions is measured, and priced once a step."""

import pytest

from evener.core.figures import Figure
from evener.cost.step import step_cost
from evener.planner.predict import _busy_by_cause
from tests.unit.profiling.fakes import ScriptedDriver
from tests.unit.profiling.test_measure import cost, profiled


class Told:
    """Notes what it is asked for."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def arrive(self, batch) -> None:
        self.calls.append("arrive")

    def look(self, batch) -> None:
        self.calls.append("look")

    def depart(self) -> None:
        self.calls.append("depart")

    def read(self, loss) -> None:
        assert not loss.requires_grad
        self.calls.append("read")


def seconds(action, signature):
    return {"ROWS": 7e-3, "READ": 3e-3}.get(action) or cost(action, signature)


def test_rows_on_their_way_and_reads_of_a_step_are_measured_and_priced_once() -> None:
    told = Told()
    profile = profiled(driver=ScriptedDriver(seconds), beside=told)
    assert told.calls[:4] == ["arrive", "look", "depart", "read"]
    row = profile.steps[0]
    assert isinstance(row.rows_s, Figure) and row.rows_s.value == pytest.approx(7e-3)
    assert row.step_overhead_s is not None and row.step_overhead_s.value == pytest.approx(3e-3)
    causes = _busy_by_cause(step_cost(profile, row.kind), 4, 2)
    assert causes["transfer"] == pytest.approx(7e-3) and causes["overhead"] == pytest.approx(3e-3)


def test_without_tables_or_a_card_nothing_is_added() -> None:
    causes = _busy_by_cause(step_cost(profile := profiled(), profile.steps[0].kind), 4, 2)
    assert "transfer" not in causes and causes["overhead"] == 0
