import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from evener.cli.doctor import doctor
from evener.core.files import read, write
from evener.core.host import Card, Cpu, Failure, HostFacts, NvidiaDriver, Setting, TorchBuild
from evener.errors import FileError, UsageError

HOSTS = Path(__file__).parents[1] / "diagnosis" / "hosts"
HEALTHY = HostFacts(
    host="lab1",
    python="3.12.3",
    torch=TorchBuild(version="2.13.0+cpu"),
    cpu=Cpu(model="CPU", threads=2, dtypes={"float32": 1e11}, dtype_errors={"float16": "no"}),
    settings=(Setting(name="OMP_NUM_THREADS", value="2"),),
)


def run(*arguments):
    app = typer.Typer()
    app.command()(doctor)
    return CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.fixture
def looked(monkeypatch):
    """What `look` was asked for, in place of looking."""
    asked = {}

    def look(**given):
        asked.update(given)
        return HEALTHY

    monkeypatch.setattr("evener.probing.host.look", look)
    return asked


def saved(tmp_path, facts: HostFacts, name: str = "host.json") -> Path:
    file = tmp_path / name
    write(file, facts)
    return file


def from_case(tmp_path, name: str) -> list[Path]:
    case = json.loads((HOSTS / f"{name}.json").read_text(encoding="utf-8"))
    facts = [msgspec.convert(h, HostFacts) for h in case["hosts"]]
    return [saved(tmp_path, f, f"{f.host}.json") for f in facts]


def test_this_host_is_looked_at_and_kept(looked, tmp_path):
    file = tmp_path / "lab1.json"
    result = run("--save", file, "--peer", "lab2", "--host", "lab1", "--no-measure", "--json")
    assert result.exit_code == 0
    assert looked == {
        "host": "lab1",
        "peers": ["lab2"],
        "measure": False,
        "command_line": {"peer": "lab2"},
    }
    assert read(file, HostFacts) == HEALTHY
    last = json.loads(result.stdout.splitlines()[-1])
    assert last["grade"] == "works"
    assert [f["code"] for f in last["findings"]] == ["DR902"]
    assert msgspec.convert(last["hosts"][0], HostFacts) == HEALTHY
    assert "OMP_NUM_THREADS=2 (environment)" in result.stdout
    assert "float32 100 GFLOP/s, float16 does not run" in result.stdout


def test_what_will_fail_ends_with_1_and_names_the_line_that_mends_it(tmp_path):
    result = run(*from_case(tmp_path, "gtx1080ti-cu128"))
    assert result.exit_code == 1
    assert "will fail    DR101 lab1/gpu0" in result.stdout
    assert 'pip install "torch==2.13.0+cu126" --index-url "$TORCH_INDEX/cu126"' in result.stdout


def test_what_is_slow_ends_with_0(tmp_path):
    result = run(*from_case(tmp_path, "power-limit"))
    assert result.exit_code == 0
    assert "works slowly DR402" in result.stdout and result.stdout.splitlines()[-1] == "works slowly"


def test_hosts_of_a_job_are_judged_together(tmp_path):
    result = run(*from_case(tmp_path, "nvidia-and-amd-hosts"), "--json")
    assert result.exit_code == 0
    last = json.loads(result.stdout.splitlines()[-1])
    assert last["pairs"] == [
        {"a": "amd1", "b": "nv1", "transport": "gloo", "why": "RCCL and NCCL do not mix"}
    ]
    assert "amd1 - nv1: gloo" in result.stdout


def test_a_file_from_elsewhere_cannot_steer_the_terminal(tmp_path):
    facts = HostFacts(
        host="[bold]a[/bold]",
        torch=TorchBuild(version="2.13.0\x1b[2J"),
        nvidia=NvidiaDriver(library="580.1\x07"),
        cards=(
            Card(kind="[link=x]card\n\nworks", vendor="nvidia", torch_index=0, hardware_id="\x1b]0;x\x07"),
        ),
        failures=(Failure(asked="\x9b31m", how="\u202eright to left"),),
    )
    result = run(saved(tmp_path, facts), "--json")
    *shown, last = result.stdout.splitlines()
    assert result.exit_code == 0 and json.loads(last)["hosts"][0]["host"] == "[bold]a[/bold]"
    text = "\n".join(shown)
    assert "[bold]a[/bold]" in text and "[link=x]card��works works" in text
    assert not [c for c in text if not c.isprintable() and c != "\n"]


@pytest.mark.parametrize("raw", [b"", b"[]", b'{"host": 3}', b'{"host": "a", "surprise": 1}', b"\xff\xfe"])
def test_a_file_that_is_no_description_is_refused(raw, tmp_path):
    file = tmp_path / "host.json"
    file.write_bytes(raw)
    result = run(file)
    assert isinstance(result.exception, FileError)


def test_files_and_this_host_do_not_go_together(tmp_path):
    result = run(saved(tmp_path, HEALTHY), "--save", tmp_path / "x.json")
    assert isinstance(result.exception, UsageError)


def test_the_command_works_where_torch_cannot_be_imported(tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit('half installed')")
    command = [sys.executable, "-m", "evener.cli.main", "doctor", "--json"]
    done = subprocess.run(
        command, env={"PYTHONPATH": str(tmp_path), "PATH": ""}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1, done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert [f["evidence"] for f in last["findings"] if f["code"] == "DR119"] == ["SystemExit: half installed"]


def test_rates_of_a_busy_host_say_so(monkeypatch, capsys):
    for load, said in ((1.9, True), (0.1, False)):
        busy = msgspec.structs.replace(HEALTHY, load=load)
        monkeypatch.setattr("evener.probing.host.look", lambda busy=busy, **_: busy)
        told = run().output
        assert ("busy with other work (load average 1.9), quiet it is faster" in told) == said
