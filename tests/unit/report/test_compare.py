"""Predicted beside measured."""

import pytest

from evener.report.compare import compare


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
