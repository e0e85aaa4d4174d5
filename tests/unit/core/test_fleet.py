"""What a person may get wrong in a fleet written by hand."""

import itertools

import pytest

from evener.core.figures import Figure, line
from evener.core.files import decode
from evener.core.fleet import FAMILIES, Device, Fleet, Link, Rehearsed
from evener.errors import FileError
from evener.rehearsal.counting import family_of


@pytest.mark.parametrize("threads", [0, -2])
def test_a_device_has_a_thread_or_more(threads: int) -> None:
    with pytest.raises(ValueError, match=f"'lab/a' needs 1 thread or more, got {threads}"):
        Device(name="lab/a", kind="slow", threads=threads)


def test_a_misspelt_family_is_told_with_those_there_are() -> None:
    raw = b'{"factors": {"matmull": 0.5}}'
    with pytest.raises(FileError, match="'matmull', not one of matmul, attention, convolution, other"):
        decode(raw, Rehearsed, "fleet.json")


def test_the_families_are_those_that_a_rehearsal_counts() -> None:
    operations = ("addmm", "_scaled_dot_product_flash_attention_for_cpu", "convolution", "_cdist_forward")
    assert tuple(family_of(name) for name in operations) == FAMILIES


def test_the_link_to_a_host_is_the_devices_own_else_that_inside_the_host():
    inside, own = (
        Link(a="lab", b="lab", curve=line(1e-3, 1e9, source="assumed")),
        Link(a="lab", b="lab/a", curve=line(1e-4, 1e9, source="assumed")),
    )
    devices = (Device(name="lab/a", kind="k"), Device(name="lab/b", kind="k"), Device(name="far/c", kind="k"))
    fleet = Fleet(devices=devices, links=(inside, own))
    assert fleet.host_link("lab/a") is own
    assert fleet.host_link("lab/b") is inside
    assert fleet.host_link("far/c") is None


def test_accelerators_are_rehearsed_as_a_type_of_their_own():
    devices = (Device(name="lab/a", kind="k", type="cuda", index=1), Device(name="lab/cpu", kind="c"))
    rehearsed = Fleet(devices=devices).as_rehearsed()
    assert [(d.type, d.index) for d in rehearsed.devices] == [("rehearsal", None), ("cpu", None)]


@pytest.mark.parametrize(
    ("field", "value"),
    [("launch_s", 1e9), ("bytes_per_s", 1e30), ("memory_bytes", 1e30), ("flops", 1e30), ("watts", 1e30)],
)
def test_what_no_device_has_is_refused(field: str, value: float) -> None:
    figure = Figure(value=value, source="assumed")
    with pytest.raises(ValueError, match=f"'lab/a' has {field}.* of 1e[+](09|30): at most"):
        Device(name="lab/a", kind="k", **{field: {"float32": figure} if field == "flops" else figure})


@pytest.mark.parametrize("word", ["name", "kind"])
def test_a_name_is_no_novel(word: str) -> None:
    given = {"name": "lab/a", "kind": "k"}
    with pytest.raises(ValueError, match=f"a device's {word} has 50.. characters, at most 200"):
        Device(**(given | {word: given[word] + "x" * 5000}))


def test_a_link_whose_shortest_message_takes_years_is_refused() -> None:
    with pytest.raises(ValueError, match=r"1e[+]09 s for the least bytes: at most 1e[+]06 s"):
        line(1e9, 1e9)


def test_a_fleet_is_joined_by_what_it_lacks_of_another():
    """One device leaves as another joins: for a moment there are both."""

    def of(*names: str) -> Fleet:
        devices = tuple(Device(name=f"{n}/0", kind="k") for n in names)
        pairs = itertools.pairwise(names)
        return Fleet(devices=devices, links=tuple(Link(a=a, b=b, curve=line(1e-3, 1e9)) for a, b in pairs))

    both = of("a", "b").joined_by(of("b", "c"))
    assert [d.name for d in both.devices] == ["a/0", "b/0", "c/0"]
    assert both.link("a/0", "b/0") and both.link("b/0", "c/0") and both.link("a/0", "c/0") is None
    assert of("a", "b").joined_by(of("a", "b")) == of("a", "b")
