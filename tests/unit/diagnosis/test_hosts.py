"""Host descriptions, many after public reports, each with the findings that it has to give and no other."""

import json
from pathlib import Path

import msgspec
import pytest

from evener.core.host import HostFacts
from evener.diagnosis.across import across
from evener.diagnosis.finding import CODES, GRADES
from evener.diagnosis.findings import findings

FOLDER = Path(__file__).with_name("hosts")
FILES = sorted(FOLDER.glob("*.json"))


def load(file: Path) -> dict:
    return json.loads(file.read_text(encoding="utf-8"))


def judge(case: dict) -> list:
    hosts = [msgspec.convert(h, HostFacts) for h in case["hosts"]]
    peers = case.get("peers", False)
    return [*across(hosts), *(f for h in hosts for f in findings(h, peers=peers))]


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_a_description_gives_its_findings_and_no_other(file: Path) -> None:
    case = load(file)
    found = judge(case)
    told = sorted((f.code, f.grade, f.where) for f in found)
    assert told == sorted((e["code"], e["grade"], e["where"]) for e in case["expect"])
    for wanted in case["expect"]:
        mends = [f.mend for f in found if (f.code, f.where) == (wanted["code"], wanted["where"])]
        if "mend" in wanted:
            assert wanted["mend"] in mends


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_every_finding_has_words_evidence_and_what_mends_it(file: Path) -> None:
    for finding in judge(load(file)):
        assert finding.code in CODES and finding.grade in GRADES
        assert finding.what and finding.evidence and finding.where
        assert finding.mend or finding.grade == "works" or finding.code == "DR116"


def test_there_are_enough_descriptions_and_reports() -> None:
    cases = [load(f) for f in FILES]
    assert len(cases) >= 40
    links = {c["source"] for c in cases if c.get("source")}
    assert len(links) >= 40 and all(link.startswith("https://") for link in links)
    # in these the thread itself names what mends it; elsewhere the mending line is ours
    assert len({c["source"] for c in cases if c.get("answered")}) >= 20
    assert all(c["report"] for c in cases)


def test_every_code_is_met_by_a_description() -> None:
    met = {e["code"] for f in FILES for e in load(f)["expect"]}
    assert set(CODES) - met == {"DR122", "DR202", "DR901"}  # tested below
