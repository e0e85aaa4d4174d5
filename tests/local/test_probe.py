"""Probing this machine for real, twice."""

import pytest

from benchmarks.probe_twice import differences
from evener.core.files import decode, encode
from evener.core.fleet import Fleet
from evener.probing import probe


@pytest.mark.slow
def test_a_second_probe_stays_within_the_spread():
    first, second = (probe(quick=True, devices=["cpu"], host="here") for _ in range(2))
    (cpu,) = first.devices
    assert {"float64", "float32"} <= set(cpu.flops)
    assert cpu.free_memory_bytes.value <= cpu.memory_bytes.value
    (link,) = first.links
    assert (link.a, link.b) == ("here", "here")
    figures = [*cpu.flops.values(), cpu.bytes_per_s, cpu.launch_s, cpu.free_memory_bytes, link.curve]
    assert all(f.source == "measured" and f.spread >= 0.05 for f in figures)
    assert "medians of" in first.note
    assert decode(encode(first), Fleet, "fleet") == first
    # Other tests may have come or gone between the two, which neither could see: one in ten may be off.
    found = differences(first, second)
    assert len(found) >= 15
    assert sum(d.ratio > 1 for d in found) <= len(found) / 10, found
