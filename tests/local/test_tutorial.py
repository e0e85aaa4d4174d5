"""The tutorial's blocks run in their order, with fewer steps, and say what the tutorial quotes."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
SHORTER = {
    "--steps 120": "--steps 4 --no-heldout",
    "--steps 100": "--steps 8",
    "--checkpoint-every 50": "--checkpoint-every 4",
    "--steps 200": "--steps 12",
    "--steps 90": "--steps 16",
    "at 20": "at 3",
    "at 40": "at 6",
    "probe": "probe --quick",
    "doctor": "doctor --no-measure",
    "verify mine.py": "verify mine.py --steps 2",
}
ONE_BY_ONE = re.compile("|".join(rf"\b{re.escape(a)}\b" if a[0] != "-" else re.escape(a) for a in SHORTER))


def shorter(command: str) -> str:
    """`command` with fewer steps and rounds."""
    return ONE_BY_ONE.sub(lambda found: SHORTER[found.group()], command)


def check_installs(command: str) -> None:
    """What pip is pointed at is there; nothing is installed."""
    words = shlex.split(command)
    if "-c" in words:
        assert (ROOT / words[words.index("-c") + 1]).is_file()
    extras = re.findall(r"\[(\w+)\]", words[-1])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(extras) <= set(project["optional-dependencies"])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_block_runs_and_prints_what_is_quoted(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    here = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "150"}
    here["PATH"] = f"{Path(sys.executable).parent}:{here['PATH']}"
    told, ran = "", 0
    for kind, text in BLOCKS:
        if kind == "python":
            (tmp_path / "mine.py").write_text(text, encoding="utf-8")
        elif kind == "text":
            missing = [line for line in text.splitlines() if line not in told]
            assert not missing, f"{missing} not in\n{told}"
        else:
            for command in text.splitlines():
                if command.startswith("pip "):
                    check_installs(command)
                    continue
                begun = time.monotonic()
                done = subprocess.run(
                    shlex.split(shorter(command)),
                    cwd=tmp_path,
                    env=here,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    timeout=120,
                )
                told, ran = done.stdout, ran + 1
                print(f"{time.monotonic() - begun:.1f} s  {shorter(command)}")
                # the doctor's 1 is about this machine, not about the tutorial
                assert done.returncode in ((0, 1) if "doctor" in command else (0,)), f"{command}\n{told}"
    assert ran == PAGE.count("\nevener ")
    assert "<html" in (tmp_path / "report.html").read_text(encoding="utf-8")
    changes = (tmp_path / "runs" / "changing" / "generations.jsonl").read_text(encoding="utf-8")
    assert changes.splitlines()  # with as few steps the one that joins may come too late


def test_each_shortening_is_of_a_line_that_is_there() -> None:
    commands = "\n".join(text for kind, text in BLOCKS if kind == "sh")
    assert not [a for a in SHORTER if a not in commands]
