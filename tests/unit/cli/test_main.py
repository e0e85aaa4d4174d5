"""What the command says where a package is missing, and what it says before it loads torch."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evener.cli import main as command


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("torch", "torch cannot be imported"),
        ("torch.distributed", "torch cannot be imported"),
        ("numpy", "the package numpy cannot be imported"),
    ],
)
def test_a_package_that_is_not_there_is_no_defect_of_evener(
    missing: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lacking(app: Any) -> Callable[..., int]:
        raise ModuleNotFoundError(f"No module named '{missing}'", name=missing)

    monkeypatch.setattr(command.typer.main, "get_command", lacking)
    with pytest.raises(SystemExit) as ended:
        command.main(["train", "job.py"])
    told = capsys.readouterr().err
    assert ended.value.code == 2 and said in told and "EV601" in told and "Traceback" not in told
    assert ("evener doctor" in told) == missing.startswith("torch")


HASTY = """
import json, sys
sys.modules["torch"] = None  # importing it is an ImportError, which is told as EV601
from evener.cli.main import main
for argv in json.loads(sys.argv[1]):
    try:
        main([*argv.split(), "--json"])
    except SystemExit:
        pass
"""
WRONG = {
    "train no.py": "EV101",
    "train job.py --epochs 0": "EV103",
    "train job.py --noise 1": "EV103",
    "train job.py --compress int7": "EV103",
    "train job.py --faults x": "EV103",
    "train job.py --place x": "EV103",
    "train job.py --checkpoint-every 0": "EV103",
    "train job.py --resume no": "EV103",
    "train job.py --plan no.json": "EV101",
    "train job.py --profile no.json": "EV101",
    "train job.py --fleet no.json": "EV101",
    "train job.py --devices ,": "EV103",
    "train job.py --checkpoint-every 1e400s": "EV103",
    "train job.py --open-at here": "EV103",
    "train job.py --listen here:99999": "EV103",
    "train --join 127.0.0.1:1": "EV103",
    "predict job.py --out x.npz --weights no": "EV103",
    "train job.py --rehearse job.py": "EV101",
    "verify no.py": "EV101",
    "verify job.py --fewer seldom": "EV103",
    "predict no.py --out x.npz": "EV101",
    "predict job.py --out x.txt": "EV103",
    "predict job.py --out .": "EV103",
    "predict job.py --out folder.npz": "EV101",
    "profile no.py": "EV101",
    "profile job.py --micro-batches 0": "EV103",
    "profile job.py -o folder.npz": "EV101",
    "probe -o job.py/fleet.json": "EV101",
    "preflight": "EV103",
    "preflight --meet lab --processes 2 --number 0": "EV103",
    "checkpoints no": "EV101",
    "train job.py": "EV601",
}


def test_what_needs_no_torch_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    """Loading it took 2.5 s of each wrong option."""
    (tmp_path / "job.py").write_text("def recipe(): ...")
    (tmp_path / "folder.npz").mkdir()
    environment = {**os.environ, "RANK": "0"}  # no fork server, as under torchrun
    done = subprocess.run(
        [sys.executable, "-c", HASTY, json.dumps(list(WRONG))],
        cwd=tmp_path,
        env={k: v for k, v in environment.items() if k != "WORLD_SIZE"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    codes = [json.loads(line)["error"]["code"] for line in done.stdout.splitlines()]
    assert dict(zip(WRONG, codes, strict=True)) == WRONG, done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder.npz", "job.py"]
