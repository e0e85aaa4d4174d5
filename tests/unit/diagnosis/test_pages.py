"""Every finding has a section in docs/doctor.md, and pages point only at what is there."""

import re
from pathlib import Path

from evener.diagnosis.finding import CODES

DOCS = Path(__file__).parents[3] / "docs"
DOCTOR = (DOCS / "doctor.md").read_text(encoding="utf-8")
TROUBLE = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")


def test_every_finding_has_a_section_and_no_other() -> None:
    sections = dict(re.findall(r"^### (DR\d{3})\n\n(.*?)(?=^#|\Z)", DOCTOR, re.MULTILINE | re.DOTALL))
    assert list(sections) == list(CODES)
    for code, text in sections.items():
        assert text.lower().startswith(f"*{CODES[code].lower()}.*")


def test_errors_lead_to_the_findings() -> None:
    assert "doctor.md" in (DOCS / "errors.md").read_text(encoding="utf-8")


def test_links_of_the_troubleshooting_page_exist() -> None:
    linked = re.findall(r"\[(DR\d{3})\]\(doctor\.md#(dr\d{3})\)", TROUBLE)
    assert len(linked) > 20
    assert all(code in CODES and code.lower() == place for code, place in linked)
    named = set(re.findall(r"EV\d{3}", TROUBLE))
    known = set(re.findall(r"^## (EV\d{3})", (DOCS / "errors.md").read_text(encoding="utf-8"), re.MULTILINE))
    assert named <= known


def test_the_symptoms_that_people_name_are_there() -> None:
    for symptom in (
        "slower than one card",
        "same device",
        "CPU updates slow",
        "out of memory on the small card",
        "hang at init",
        "a device was lost",
        "a device cannot join",
        "StateLostError",
    ):
        assert symptom in TROUBLE
