"""`evener advise` as a person runs it: without torch, at most three, each with its gain."""

import json
import subprocess
import sys

from tests.architecture.source import ROOT

NO_TORCH = "import sys; sys.modules['torch'] = None; from evener.cli.main import main; main()"
HOME = "examples/fleets/by-kind/home.json"


def run(*args):
    command = [sys.executable, "-c", NO_TORCH, "advise", HOME, "--model", "gpt2", "--batch", "64", *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_three_changes_with_gains_and_sums():
    done = run("--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert len(answer["helps"]) == 3 and answer["not_tried"] == 0
    for gain in answer["helps"]:
        assert gain["gain"] >= 0.01 and gain["after"]["played"]
        assert abs(sum(gain["after"]["seconds"].values()) - gain["after"]["step_s"]) < 1e-9
    assert "1. add" in done.stderr and "then:" in done.stderr and "assumed:" in done.stderr


def test_more_on_demand():
    done = run("--most", "1", "--all", "--consider", "H100")
    assert done.stdout.count("     then:") == 1
    assert "1. add H100 lab1" in done.stdout and "also tried: link lab1 lab2" in done.stdout
