"""A table goes where it costs least and fits; where it fits nowhere the sum is told."""

import pytest
from msgspec.structs import replace

from evener.core.collectives import ring
from evener.core.figures import Figure, line
from evener.core.fleet import Device, Fleet, Link
from evener.core.tables import TableUse
from evener.errors import NoPlanFitsError
from evener.planner.tables import TableChoice, no_device_holds, place_table, place_tables, table_sites

GIB = 2**30


def figure(value: float) -> Figure:
    return Figure(value=value, source="assumed")


def device(number: int, gib: float, **more: object) -> Device:
    return Device(
        name=f"lab/{number}",
        kind=f"kind {number}",
        memory_bytes=figure(gib * GIB),
        bytes_per_s=figure(1e10),
        **more,  # type: ignore[arg-type]
    )


def cpus(*gib: float) -> Fleet:
    devices = tuple(device(i, g) for i, g in enumerate(gib))
    return Fleet(devices=devices, links=(Link(a="lab", b="lab", curve=line(1e-4, 1e9)),))


def cards(host_gib: float | None, *gib: float, bus_s: float = 1e-5) -> Fleet:
    devices = tuple(replace(device(i, g, type="cuda"), bytes_per_s=figure(5e11)) for i, g in enumerate(gib))
    host = Device(
        name="lab/cpu",
        kind="host",
        memory_bytes=figure((host_gib or 1) * GIB),
        bytes_per_s=Figure(value=1e10, source="measured"),
    )
    fleet = Fleet(devices=devices, links=(Link(a="lab", b="lab", curve=line(bus_s, 1e10)),))
    return fleet.with_hosts((host,)) if host_gib else fleet


def placed(use: TableUse, fleet: Fleet, samples: int, **more: object) -> TableChoice:
    names = tuple(d.name for d in fleet.devices)
    sites = table_sites(fleet, names, **more)  # type: ignore[arg-type]
    return place_table(use, ring(fleet, names), sites, samples)


def test_a_large_table_is_looked_up_in_parts_by_budget() -> None:
    use = TableUse(name="emb", num_rows=2_000_000, dim=64, distinct=0.54)
    choice = placed(use, cpus(5, 3, 2), 4096)
    assert choice.placement.rows == {"lab/0": 1_000_000, "lab/1": 600_000, "lab/2": 400_000}
    assert choice.placement.residence == "cpu"
    assert choice.placement.held_bytes["lab/0"] == 256_000_000
    assert choice.why == (
        "table emb: 2212 of 2000000 rows a step (assumed), 0.854 ms looked up in host memory (memory 0.396 + "
        "other devices 0.458; 488.3 MiB); 888 ms with dense gradients on every device (memory 205 + other "
        "devices 683; 976.6 MiB); host memory at 10 GB/s (assumed)"
    )


def test_a_small_table_that_every_step_touches_in_full_is_dense() -> None:
    choice = placed(TableUse(name="emb", num_rows=50, dim=8, ids_per_sample=10), cpus(1), 64)
    assert choice.placement.residence == "dense"
    assert "looked up in host memory" in choice.why


def test_a_table_of_twice_the_largest_memory_fits_in_parts() -> None:
    use = TableUse(name="emb", num_rows=2 * GIB // 256, dim=64)
    choice = placed(use, cpus(1, 0.9, 0.9), 64)
    assert sum(choice.placement.rows.values()) == use.num_rows
    assert "which does not fit" in choice.why


def test_a_table_larger_than_all_memory_is_refused_with_the_sum() -> None:
    use = TableUse(name="emb", num_rows=GIB // 64, dim=64)
    with pytest.raises(NoPlanFitsError, match="the table emb is larger than all memory") as caught:
        placed(use, cpus(1, 1), 64)
    assert caught.value.numbers == (
        "4 GiB with its optimiser's state; lab/0 768 MiB, lab/1 768 MiB: 1.5 GiB in all"
    )
    assert 'a tiered table: place={"emb": {"file": FOLDER, "rows": 3145728}}' in caught.value.remedy
    assert "at most 6291456 rows instead of 16777216" in caught.value.remedy


@pytest.mark.parametrize(
    ("host_gib", "samples", "bus_s", "residence"),
    [
        (64, 512, 5e-3, "cpu"),
        (1, 512, 5e-3, "device"),
        (64, 400_000, 5e-3, "dense"),
        (None, 512, 5e-3, "cpu"),
    ],
    ids=["few rows", "no room on the host", "every row in each step", "a host that nobody measured"],
)
def test_beside_accelerators_all_three_places_compete(
    host_gib: float | None, samples: int, bus_s: float, residence: str
) -> None:
    use = TableUse(name="emb", num_rows=4_000_000, dim=64, state_numbers=128, ids_per_sample=20)
    assert placed(use, cards(host_gib, 24, 24, bus_s=bus_s), samples).placement.residence == residence


def test_processes_of_one_host_share_its_memory() -> None:
    fleet = cards(8, 24, 24)
    sites = table_sites(fleet, ("lab/0", "lab/1"))
    assert [s.host_bytes for s in sites] == [3 * GIB, 3 * GIB]
    assert [s.device_bytes for s in sites] == [18 * GIB, 18 * GIB]
    one = replace(cpus(8, 8), devices=tuple(device(i, 8, hardware_id="cpu-1") for i in (0, 1)))
    assert [s.host_bytes for s in table_sites(one, ("lab/0", "lab/1"))] == [3 * GIB, 3 * GIB]
    assert [s.host_bytes for s in table_sites(cpus(8, 8), ("lab/0", "lab/1"))] == [6 * GIB, 6 * GIB]


def test_what_the_model_and_the_framework_take_is_no_room() -> None:
    fleet = replace(cpus(8), devices=(device(0, 8, framework_bytes=figure(GIB)),))
    assert table_sites(fleet, ("lab/0",), beside_bytes=GIB)[0].host_bytes == 4.5 * GIB


def test_the_largest_table_chooses_first_and_the_others_have_the_rest() -> None:
    small = TableUse(name="small", num_rows=GIB // 1024, dim=64)
    large = TableUse(name="large", num_rows=GIB // 512, dim=64)
    fleet = cpus(1)
    sites = table_sites(fleet, ("lab/0",))
    found = place_tables((small, large), fleet, sites, 64)
    assert [c.placement.table for c in found] == ["small", "large"]
    assert sum(c.placement.held_bytes["lab/0"] for c in found) == 0.75 * GIB
    with pytest.raises(NoPlanFitsError) as caught:
        place_tables((small, large, replace(small, name="third")), fleet, sites, 64)
    assert caught.value.numbers.endswith("large took 512 MiB before; small took 256 MiB before")


def test_links_that_nobody_knows_are_assumed_and_said() -> None:
    use = TableUse(name="emb", num_rows=2_000_000, dim=64)
    fleet = replace(cpus(5, 3), links=())
    (choice,) = place_tables((use,), fleet, table_sites(fleet, ("lab/0", "lab/1")), 4096)
    assert choice.why.endswith("; links at 1 GB/s (assumed)")
    assert choice.price.exchange_s > 1e-4


def test_a_residence_that_is_asked_for_is_kept() -> None:
    use = TableUse(name="emb", num_rows=4_000_000, dim=64)
    fleet = cards(64, 24)
    (choice,) = place_tables((use,), fleet, table_sites(fleet, ("lab/0",)), 64, only={"emb": "device"})
    assert choice.placement.residence == "device"
    assert choice.price.total_s > 0.0347e-3, "host memory would be faster"
    assert "(assumed), 0.0468 ms looked up in the devices' memory" in choice.why


def test_a_table_beyond_every_device_is_placed_unasked() -> None:
    use = TableUse(name="emb", num_rows=GIB // 256, dim=64)  # 1 GiB, and as much of gradients
    assert no_device_holds(use, cards(64, 1.9, 1.5))
    assert not no_device_holds(use, cards(64, 2.1, 1.5))
    unknown = replace(cpus(1), devices=(replace(device(0, 1), memory_bytes=None),))
    assert not no_device_holds(use, unknown)
