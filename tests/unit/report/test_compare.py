"""Predicted beside measured."""

import pytest

from evener.core.trace import Span, Trace
from evener.report.compare import compare, seconds_per_step


def test_the_example_of_the_docstring():
    compute, wait = compare(
        {"lab/a": {"compute": 0.9}}, {"lab/a": {"compute": 1.0, "wait": 0.1, "input": 0.0}}
    ).differences
    assert (compute.device, compute.cause) == ("lab/a", "compute")
    assert compute.difference_s == pytest.approx(-0.1)
    assert compute.error == pytest.approx(-0.1)
    assert (wait.predicted_s, wait.measured_s, wait.error) == (0.0, 0.1, pytest.approx(-1.0))


def test_what_was_not_measured_has_no_relative_error():
    (only,) = compare({"a/b": {"reduce": 0.1}}, {"a/b": {}}).differences
    assert only.error is None
    assert only.difference_s == pytest.approx(0.1)


def test_devices_without_partner_are_named():
    told = compare({"a/x": {"compute": 1.0}, "a/y": {}}, {"a/x": {"compute": 1.0}, "a/z": {"wait": 1.0}})
    assert told.only_predicted == ("a/y",)
    assert told.only_measured == ("a/z",)
    assert [d.device for d in told.differences] == ["a/x"]


def test_the_largest_difference_is_of_seconds_either_way():
    told = compare(
        {"a/x": {"compute": 9.0, "wait": 0.1}, "a/y": {"compute": 1.0}},
        {"a/x": {"compute": 10.0, "wait": 0.2}, "a/y": {"compute": 3.0}},
    )
    assert told.largest.device == "a/y"
    assert compare({}, {}).largest is None


def test_seconds_per_step_of_a_trace():
    spans = tuple(
        Span(device="a/x", action="0F0", start_s=i, end_s=i + 0.5, cause="compute", step=i) for i in range(4)
    )
    told = seconds_per_step(Trace(source="measured", spans=spans, steps=4))
    assert told["a/x"]["compute"] == pytest.approx(0.5)
    assert seconds_per_step(Trace(source="predicted", spans=spans[:1]))["a/x"]["compute"] == 0.5
