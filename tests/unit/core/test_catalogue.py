"""Published figures: complete, sourced, found by whole names only, and never over what was measured."""

import json

import pytest

from evener.core.catalogue import (
    FleetFile,
    FleetLine,
    Scale,
    catalogue,
    check_known,
    known_device,
    link_curve,
    near_kinds,
    read_fleet,
    resolved,
)
from evener.core.figures import Figure, line
from evener.core.files import write
from evener.core.fleet import Device
from evener.errors import FileError, UnknownNameError


def fleet(*devices: Device, links=()):
    return resolved(FleetFile(devices=devices, links=links), "a file")


def test_names_and_aliases_are_used_once():
    for names in (
        [n.casefold() for d in catalogue().devices for n in (d.kind, *d.aliases)],
        [n.casefold() for x in catalogue().links for n in (x.name, *x.aliases)],
    ):
        assert len(names) == len(set(names))


@pytest.mark.parametrize("entry", catalogue().devices, ids=lambda d: d.kind)
def test_every_number_has_a_source_and_a_sane_size(entry):
    assert entry.sheet
    assert set(entry.derived) <= {*entry.tflops, "memory_gb", "gb_per_s", "watts"}
    assert 0.5 < entry.tflops["float32"] < 200 and all(0 < t < 3000 for t in entry.tflops.values())
    assert 20 < (entry.gb_per_s or 100) <= 8000 and 3 <= (entry.memory_gb or 16) <= 256
    assert entry.memory_gb or "memory" in entry.note
    lower = [t for d, t in entry.tflops.items() if d != "float32"]
    assert all(t > entry.tflops["float32"] for t in lower)


@pytest.mark.parametrize(
    ("kind", "float32", "bfloat16", "memory_gb", "gb_per_s"),
    [
        ("NVIDIA A100-SXM4-80GB", 19.5, 312, 80, 2039),
        ("NVIDIA H100 80GB HBM3", 67, 989.5, 80, 3350),
        ("NVIDIA GeForce RTX 3090", 35.58, 71.16, 24, 936),
        ("NVIDIA GeForce RTX 4090", 82.58, 165.16, 24, 1008),
        ("AMD Instinct MI300X", 163.4, 1307.4, 192, 5300),
    ],
)
def test_well_known_figures(kind, float32, bfloat16, memory_gb, gb_per_s):
    found = known_device(kind)
    assert (found.tflops["float32"], found.tflops["bfloat16"]) == (float32, bfloat16)
    assert (found.memory_gb, found.gb_per_s) == (memory_gb, gb_per_s)


def test_a_kind_alone_gives_figures_from_the_table():
    (device,) = fleet(Device(name="lab1/gpu0", kind="nvidia geforce rtx 3060")).devices
    assert device.kind == "nvidia geforce rtx 3060" and device.type == "cuda"
    assert device.memory_bytes.value == 12e9 and device.bytes_per_s.value == 360e9
    table = [device.memory_bytes, device.bytes_per_s, *device.flops.values()]
    assert all(f.source == "table" and "GA102" in f.note for f in table)
    assert device.launch_s.source == device.framework_bytes.source == "assumed"


def test_what_was_measured_stays_and_what_was_written_counts():
    measured = Device(name="a/0", kind="Tesla T4", flops={"float32": Figure(value=4e12, source="measured")})
    assert fleet(measured).devices == (measured,)
    written = Device(name="a/0", kind="Tesla T4", memory_bytes=Figure(value=15e9, source="assumed"))
    (device,) = fleet(written).devices
    assert device.memory_bytes == written.memory_bytes and device.flops["float32"].value == 8.1e12


def test_a_part_of_a_name_is_no_name():
    assert known_device("NVIDIA GeForce RTX 3060 Laptop GPU") is None and known_device("3060") is None
    assert "NVIDIA GeForce RTX 3060" in near_kinds("RTX 3O60")


def test_a_cpu_with_fewer_threads_has_its_part_of_the_rate():
    (half,) = fleet(Device(name="a/cpu", kind="AMD EPYC 7742", threads=32)).devices
    assert half.flops["float32"].value == pytest.approx(64 * 2.25e9 * 32 / 2)


@pytest.mark.parametrize(
    ("name", "seconds"),
    [
        ("1 Gbit/s Ethernet", 1e-4 + 1e9 / (0.125e9 * 0.9)),
        ("PCIe 4.0 x16", 1e-5 + 1e9 / (31.508e9 * 0.8)),
        ("nvlink 3", 8e-6 + 1e9 / (300e9 * 0.8)),
        ("InfiniBand NDR", 1.5e-5 + 1e9 / (50e9 * 0.9)),
        ("400GbE", 5e-5 + 1e9 / (50e9 * 0.7)),
    ],
)
def test_a_link_by_its_name(name, seconds):
    curve = link_curve(name, "here")
    assert curve.seconds(1e9) == pytest.approx(seconds, rel=1e-4) and curve.source == "table"


def test_a_file_may_name_links_and_read_what_was_written(tmp_path):
    path = tmp_path / "fleet.json"
    path.write_text(
        json.dumps(
            {
                "devices": [{"name": "a/0", "kind": "T4"}, {"name": "b/0", "kind": "T4"}],
                "links": [{"a": "a", "b": "b", "kind": "10GbE"}],
            }
        )
    )
    found = read_fleet(path)
    assert found.link("a/0", "b/0").curve == line(1e-4, 1.25e9 * 0.9, source="table")
    write(path, found)
    assert read_fleet(path) == found


def test_bad_links_are_refused_with_their_place(tmp_path):
    devices = [{"name": "a/0", "kind": "T4"}, {"name": "b/0", "kind": "T4"}]
    for link, error, words in (
        ({"kind": "10 GbEE"}, UnknownNameError, "10 Gbit/s Ethernet"),
        ({}, FileError, "link a - b has neither"),
        ({"kind": "10GbE", "bandwidth": 3}, FileError, "links"),
        ({"curve": {"points": [[0, -1]], "source": "assumed"}}, FileError, "positive"),
    ):
        path = tmp_path / "fleet.json"
        path.write_text(json.dumps({"devices": devices, "links": [{"a": "a", "b": "b", **link}]}))
        with pytest.raises(error, match=words) as caught:
            read_fleet(path)
        assert "fleet.json" in caught.value.what
    with pytest.raises(FileError, match="no device or host"):
        path.write_text(json.dumps({"devices": devices, "links": [{"a": "a", "b": "c", "kind": "10GbE"}]}))
        read_fleet(path)


def test_a_scaled_fleet_keeps_the_ratios_of_the_real_one():
    devices = (Device(name="lab/a", kind="RTX 3060"), Device(name="lab/b", kind="RTX 3080"))
    links = (FleetLine(a="lab", b="lab", kind="PCIe 4.0 x16"),)
    real = resolved(FleetFile(devices=devices, links=links), "here")
    scale = Scale(slower=1000, smaller=100)
    small = resolved(FleetFile(devices=devices, links=links, scaled=scale), "here")
    for one, other in zip(real.devices, small.devices, strict=True):
        assert other.flops["float32"].value == pytest.approx(one.flops["float32"].value / 1000)
        assert other.bytes_per_s.value == pytest.approx(one.bytes_per_s.value / 1000)
        assert other.memory_bytes.value == pytest.approx(one.memory_bytes.value / 100)
        assert other.launch_s == one.launch_s
        assert other.kind == f"{one.kind}, 1000 times slower, 100 times smaller"
        assert other.rehearsed.smaller == 100 and "÷ 1000" in other.flops["float32"].note
    assert small.links[0].curve.seconds(1e6) == pytest.approx(1000 * real.links[0].curve.seconds(1e6))


def test_a_scale_cannot_make_things_faster_or_larger():
    with pytest.raises(ValueError, match="slower must be 1 or more"):
        Scale(slower=0.5)


def test_a_scale_has_an_end():
    with pytest.raises(ValueError, match="smaller must be 1 or more and at most 1e6, got 1e\\+09"):
        Scale(smaller=1e9)


def test_a_device_of_an_unknown_kind_without_figures_is_named_with_kinds_like_it():
    with pytest.raises(UnknownNameError, match=r"lab/b has no figures(.|\n)*RTX 3060"):
        check_known((Device(name="lab/a", kind="T4"), Device(name="lab/b", kind="rtx3060 card")))
    known = Figure(value=1e9, source="assumed")
    check_known((Device(name="lab/b", kind="my own", flops={"float32": known}),))
