import json
import subprocess
import sys

import pytest

from evener.cli.main import main
from evener.core.files import read, write
from evener.core.plan import Plan
from evener.report.chrome import read_chrome_trace
from tests.unit.cost.test_actions import CUT, fleet, profile


@pytest.fixture
def files(tmp_path):
    for name, value in (("plan", CUT), ("fleet", fleet()), ("profile", profile())):
        write(tmp_path / f"{name}.json", value)
    return tmp_path


def evener(files, capsys, *more: str) -> tuple[int, dict, str]:
    args = [files / "plan.json", "--fleet", files / "fleet.json", "--profile", files / "profile.json", *more]
    with pytest.raises(SystemExit) as ended:
        main(["simulate", *map(str, args), "--json"])
    out, err = capsys.readouterr()
    return ended.value.code, json.loads(out.splitlines()[-1]), err


def test_the_object_and_the_text(files, capsys):
    code, found, text = evener(files, capsys, "--schedule", "zero-bubble", "--steps", "3", "--rows")
    assert code == 0
    assert found["schedule"] == "zero-bubble" and found["steps"] == 3
    assert found["predicted_total_s"] == pytest.approx(3 * found["predicted_step_s"])
    for seconds in found["seconds"].values():
        assert sum(seconds.values()) == pytest.approx(found["predicted_total_s"])
    assert any("assumed" in note for note in found["notes"])
    assert "x/0" in text and "0SEND_F0" in text and "peak memory" in text


def test_the_trace_opens_in_a_viewer_and_repeats_to_the_byte(files, capsys):
    raws = []
    for name in ("one.json", "two.json"):
        evener(files, capsys, "--schedule", "unequal", "-o", str(files / name))
        raws.append((files / name).read_bytes())
    assert raws[0] == raws[1]
    (trace,) = read_chrome_trace(raws[0])
    assert {span.device for span in trace.spans} == {"x/0", "y/0"}


def test_faults_and_a_joiner_that_is_planned_for(files, capsys):
    whole = Plan(
        global_batch=16,
        pipelines=(type(CUT.pipelines[0])(samples=16, micro_batch=4, stages=(_all(),)),),
    )
    write(files / "plan.json", whole)
    faults = "slow x/0 x3 at 1; join y/0 at 2; leave y/0 at 3"
    code, found, _ = evener(files, capsys, "--steps", "5", "--faults", faults)
    assert code == 0
    assert len(found["log"]) == 3
    assert "planned anew over 2 devices" in found["log"][1]
    assert found["step_s_last"] == pytest.approx(3 * found["step_s_first"], rel=0.1)


def test_who_joins_is_planned_for_with_the_margin_that_was_given(files, capsys):
    """It was a tenth whatever was asked for: x/0, of whose memory nothing may be used, went on computing."""
    pipeline = type(CUT.pipelines[0])(samples=16, micro_batch=4, stages=(_all(),))
    write(files / "plan.json", Plan(global_batch=16, pipelines=(pipeline,)))
    write(files / "profile.json", profile(whole=False))
    told = ["--steps", "2", "--faults", "join y/0 at 1", "--memory-margin"]
    loose, tight = (evener(files, capsys, *told, margin)[1]["seconds"]["x/0"] for margin in ("0.1", "0.99"))
    assert 0 < tight["compute"] < loose["compute"]


def _all():
    from benchmarks.random_plans import stage

    return stage("abcd", ("x/0", 4))


@pytest.mark.parametrize(
    ("more", "code", "said"),
    [
        (["--schedule", "best"], "EV103", "gpipe, 1f1b"),
        (["--faults", "melt x/0 at 3"], "EV103", "melt x/0"),
        (["--faults", "slow x/9 x2 at 0"], "EV102", "x/9"),
    ],
)
def test_wrong_arguments(files, capsys, more, code, said):
    ended, found, text = evener(files, capsys, *more)
    assert ended == 2 and found["error"]["code"] == code
    assert said in text


def test_files_that_do_not_belong_together(files, capsys):
    plan = read(files / "plan.json", Plan)
    other = type(plan.pipelines[0])(samples=16, micro_batch=4, stages=(_all_of("abc"),))
    write(files / "plan.json", Plan(global_batch=16, pipelines=(other,)))
    ended, found, _ = evener(files, capsys)
    assert ended == 2 and found["error"]["code"] == "EV202"
    assert "d" in found["error"]["numbers"]


def _all_of(layers: str):
    from benchmarks.random_plans import stage

    return stage(layers, ("x/0", 4))


def test_it_needs_no_torch(files):
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from evener.cli.main import main\n"
        f"main(['simulate', '{files}/plan.json', '--fleet', '{files}/fleet.json', "
        f"'--profile', '{files}/profile.json', '--schedule', 'unequal', '--json'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["predicted_step_s"] > 0
