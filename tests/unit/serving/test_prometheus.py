"""What Prometheus reads of a run."""

from evener.serving.follow import Follower
from evener.serving.prometheus import exposition
from tests.unit.report.page.runs import run_folder


def told(folder) -> str:
    follower = Follower(folder)
    follower.look()
    assert follower.run is not None
    return exposition(follower.run, follower.seen).decode()


def test_a_run_that_goes_on_tells_its_efficiency(tmp_path) -> None:
    assert "evener_efficiency_ratio 0." in told(run_folder(tmp_path, finished=False))


def test_files_that_do_not_belong_together_cost_one_figure_not_all(tmp_path) -> None:
    """A plan with a device of which no rate is known ended the whole answer."""
    run = run_folder(tmp_path, finished=False)
    plan = (run / "plan.json").read_text()
    (run / "plan.json").write_text(plan.replace('"far/c"', '"far/d"', 1))  # where it takes samples
    found = told(run)
    assert "evener_step_seconds 1.2" in found and "evener_efficiency_ratio" not in found
