"""The host's rate and room as a fleet says them, passes of an optimiser, and budgets of memory."""

import pytest
from msgspec.structs import replace

from evener.core.budgets import bytes_in, with_budgets
from evener.core.catalogue import FleetFile, Scale, resolved
from evener.core.figures import Figure, line
from evener.core.fleet import Device, Disk, Fleet, Link
from evener.core.plan import Share, Stage
from evener.core.residence import host_bytes_per_s, host_disk, host_room, run_whole, step_passes
from evener.errors import UnknownNameError, UsageError

GB = 10**9


def given(value: float) -> Figure:
    return Figure(value=value, source="measured")


def fleet(*hosts: Device, link: bool = True) -> Fleet:
    card = Device(name="a/gpu0", kind="card", type="cuda", memory_bytes=given(24 * GB))
    links = (Link(a="a/gpu0", b="a", curve=line(1e-5, 12e9)),) if link else ()
    return Fleet(devices=(card,), links=links, hosts=hosts)


CPU = Device(name="a/cpu", kind="cpu", bytes_per_s=given(3e10), memory_bytes=given(64 * GB))


def test_the_hosts_rate_is_its_cpus_else_that_of_the_link_else_unknown():
    assert host_bytes_per_s(fleet(CPU), "a/gpu0") == given(3e10)
    assumed = host_bytes_per_s(fleet(), "a/gpu0")
    assert assumed is not None and assumed.source == "assumed"
    assert assumed.value == pytest.approx(12e9)
    assert host_bytes_per_s(fleet(CPU, link=False), "a/gpu0") is None


def test_the_hosts_room_is_what_the_fleet_says_of_its_one_cpu():
    assert host_room(fleet(CPU), "a/gpu0") == 64 * GB
    assert host_room(fleet(), "a/gpu0") == 0


@pytest.mark.parametrize(("states", "passes"), [(0, 3), (1, 8), (2, 21), (0.5, 5.5), (3, 34)])
def test_an_optimisers_step_goes_over_each_value_so_often(states: float, passes: float):
    assert step_passes(states) == passes


def test_layers_that_others_are_in_do_not_run_as_a_whole():
    names = ["(root)", "blocks", "blocks.0", "deep.in.one", "deep"]
    assert run_whole(names) == [False, False, True, True, False]


def test_a_stage_says_where_it_lives_in_words_that_are_known():
    share = Share(devices=("a/gpu0",), samples=1)
    assert Stage(layers=("x",), shares=(share,), residence="host").residence == "host"
    with pytest.raises(ValueError, match="residence 'moon'"):
        Stage(layers=("x",), shares=(share,), residence="moon")


def test_a_budget_is_what_a_device_has():
    told = with_budgets(fleet(CPU), ["a/gpu0=6GiB", "a/cpu=32GB"])
    assert told.devices[0].memory_bytes.value == 6 * 2**30
    assert told.hosts[0].memory_bytes.value == 32 * GB
    with pytest.raises(UsageError, match="less memory than its budget") as e:
        with_budgets(fleet(), ["a/gpu0=25GB"])
    assert e.value.numbers == "memory 22.4 GiB, budget 23.3 GiB"
    with pytest.raises(UnknownNameError):
        with_budgets(fleet(), ["b/gpu0=1GB"])


@pytest.mark.parametrize(
    ("text", "said"),
    [("foo", '"=" is missing'), ("6GiB", '"=" is missing'), ("=6GiB", "no device stands before")],
)
def test_a_budget_has_a_device_and_a_size(text: str, said: str):
    with pytest.raises(UsageError, match=f"cannot read the budget '{text}': {said}"):
        with_budgets(fleet(), [text])


@pytest.mark.parametrize("text", ["", "6", "GiB", "-1GiB", "xGiB", "6 bytes"])
def test_a_size_has_a_number_and_a_unit(text: str):
    with pytest.raises(UsageError, match="no size of a memory"):
        bytes_in(text)


def test_sizes():
    assert bytes_in("1.5GiB") == 1.5 * 2**30
    assert bytes_in("500 MB") == 5e8


def test_a_fleet_file_may_name_the_cpus_of_its_hosts_and_their_disks():
    disk = Disk(read_bytes_per_s=given(2 * GB), write_bytes_per_s=given(GB), free_bytes=given(500 * GB))
    file = FleetFile(
        devices=(Device(name="a/gpu0", kind="RTX 3080"),),
        hosts=(replace(CPU, disk=disk),),
        scaled=Scale(slower=10, smaller=100),
    )
    scaled = host_disk(resolved(file, "here"), "a/gpu0")
    assert scaled.seconds(2 * GB, GB) == pytest.approx(20) and scaled.free_bytes.value == pytest.approx(
        5 * GB
    )
    (cpu,) = resolved(file, "here").hosts
    assert cpu.bytes_per_s.value == pytest.approx(3e9) and cpu.memory_bytes.value == pytest.approx(0.64 * GB)
