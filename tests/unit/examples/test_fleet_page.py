"""The fleet files of docs/fleet-files.md can be read, and mean what the page says."""

import re

import pytest

from evener.core.catalogue import read_fleet
from tests.architecture.source import ROOT

PAGE = (ROOT / "docs" / "fleet-files.md").read_text(encoding="utf-8")
BY_KIND, BY_FIGURES = re.findall(r"```json\n(.*?)```", PAGE, flags=re.DOTALL)


def fleet_of(text, tmp_path):
    path = tmp_path / "fleet.json"
    path.write_text(text)
    return read_fleet(path)


def test_kinds_of_the_page_are_in_the_catalogue(tmp_path):
    fleet = fleet_of(BY_KIND, tmp_path)
    assert all(d.flops and d.memory_bytes for d in fleet.devices)
    gpu, cpu = fleet.device("lab2/gpu0"), fleet.device("lab2/cpu")
    assert fleet.link(gpu.name, cpu.name).kind == "PCIe 4.0 x16"
    assert cpu.flops["float32"].source == "table"


def test_the_link_takes_what_the_page_says(tmp_path):
    fleet = fleet_of(BY_FIGURES, tmp_path)
    curve = fleet.link("lab1/a", "lab2/a").curve
    assert [curve.seconds(b) for b in (5e5, 1e6, 2e6)] == pytest.approx([0.042, 0.082, 0.162])
    assert fleet.device("lab2/a").rehearsed.factors == {"attention": 0.5}
    assert len({d.kind for d in fleet.devices}) == 2
