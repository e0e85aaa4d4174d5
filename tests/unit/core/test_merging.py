import pytest

from evener.core.figures import Figure, line
from evener.core.fleet import Device, Fleet, Link
from evener.core.merging import apart, merge, unlinked
from evener.errors import UsageError


def fleet(host: str, rate: float = 1e9, **link) -> Fleet:
    flops = {"float32": Figure(value=rate, source="measured")}
    return Fleet(
        devices=(Device(name=f"{host}/cpu", kind="CPU (2 threads)", flops=flops),),
        links=(Link(a=host, b=host, curve=line(1e-5, 1e10), **link),),
        note=f"{host} was quiet",
    )


def test_devices_and_links_are_put_together_and_what_is_unknown_is_said() -> None:
    found = merge({"a.json": fleet("a"), "b.json": fleet("b"), "c.json": fleet("c")})
    assert [d.name for d in found.devices] == ["a/cpu", "b/cpu", "c/cpu"]
    assert [(x.a, x.b) for x in found.links] == [("a", "a"), ("b", "b"), ("c", "c")]
    for pair in ("a and b", "a and c", "b and c"):
        assert f"links between {pair} are unknown" in found.note
    assert "a.json: a was quiet" in found.note
    assert found.link("a/cpu", "b/cpu") is None


def test_measured_links_between_hosts_are_known() -> None:
    between = Link(a="a", b="b", curve=line(1e-3, 1e8, source="measured"))
    found = merge({"a": fleet("a"), "b": fleet("b")}, (between,))
    assert found.link("a/cpu", "b/cpu") == between
    assert unlinked(found) == [] and "unknown" not in found.note


def test_one_name_on_two_hosts_is_refused() -> None:
    with pytest.raises(UsageError, match=r"both x\.json and y\.json have a device a/cpu"):
        merge({"x.json": fleet("a"), "y.json": fleet("a")})


def test_buses_of_two_hosts_stay_apart() -> None:
    found = merge({"a": fleet("a", bus="pcie"), "b": fleet("b", bus="pcie")})
    assert [x.bus for x in found.links] == ["pcie", "b:pcie"]


def test_a_kind_whose_numbers_differ_is_said() -> None:
    found = merge({"a": fleet("a"), "b": fleet("b", rate=2e9)})
    assert "a/cpu and b/cpu are both of kind 'CPU (2 threads)' and differ" in found.note


@pytest.mark.parametrize(
    ("rate", "spread", "differ"), [(1.08e9, 0.05, False), (1.2e9, 0.05, True), (2e9, 0.6, False)]
)
def test_what_spreads_explain_is_no_difference(rate, spread, differ) -> None:
    def device(name: str, value: float) -> Device:
        figure = Figure(value=value, source="measured", spread=spread)
        return Device(name=name, kind="CPU", flops={"float32": figure})

    assert bool(apart(Fleet(devices=(device("a/cpu", 1e9), device("b/cpu", rate))))) is differ
