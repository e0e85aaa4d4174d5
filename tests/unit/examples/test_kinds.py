"""The fleets that name kinds only: all in the catalogue, and a person gets a plan with its reasons."""

import json

import pytest

from evener.cli.main import main
from evener.core.catalogue import read_fleet
from tests.architecture.source import ROOT

PATHS = sorted((ROOT / "examples" / "fleets" / "by-kind").glob("*.json"))


@pytest.mark.parametrize("path", PATHS, ids=lambda p: p.stem)
def test_kinds_become_figures_and_every_pair_has_a_link(path):
    fleet = read_fleet(path)
    assert fleet.note and all(d.flops and d.bytes_per_s and d.memory_bytes for d in fleet.devices)
    names = [d.name for d in fleet.devices]
    assert all(fleet.link(a, b) for a in names for b in names if a != b)


def plan(capsys, *words):
    with pytest.raises(SystemExit) as done:
        main(["plan", str(PATHS[0]), "--model", "gpt2", "--batch", "64", *words, "--json"])
    assert done.value.code == 0
    out, err = capsys.readouterr()
    return json.loads(out.splitlines()[-1]), err


def test_kinds_and_a_model_by_its_name_give_an_explained_plan(capsys):
    answer, told = plan(
        capsys, "--explain", "--what-if", "add RTX 4090 lab1", "--what-if", "add T4; drop lab1/gpu1"
    )
    assert answer["source"] == "assumed" and "no second of this was measured" in told
    assert answer["lower_step_s"] < 0.8 * answer["predicted_step_s"] < answer["upper_step_s"]
    others = {a["name"]: a.get("step_s") for a in answer["alternatives"]}
    for name in ("best single device", "even data parallel", "even pipeline"):
        assert others[name] > answer["predicted_step_s"]
    assert others["what if add RTX 4090 lab1"] < answer["predicted_step_s"]
    advice = {a["change"]: a for a in answer["advice"]}
    assert set(advice) >= {"links x2", "batch x2", "add NVIDIA GeForce RTX 3090"}
    assert advice["add NVIDIA GeForce RTX 3090"]["gain"] > 0.3 and advice["links x2"]["gain"] > 0
    assert "add NVIDIA GeForce RTX 3090 would help: +" in told


def test_the_precision_is_written_into_the_plan(capsys, tmp_path):
    fleet = tmp_path / "fleet.json"
    fleet.write_text('{"devices": [{"name": "a/0", "kind": "RTX 3090"}]}')
    with pytest.raises(SystemExit) as done:
        main(["plan", str(fleet), "--model", "gpt2", "-b", "8", "--precision", "bfloat16", "--json"])
    assert done.value.code == 0
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert answer["plan"]["pipelines"][0]["stages"][0]["precision"] == "bfloat16"
