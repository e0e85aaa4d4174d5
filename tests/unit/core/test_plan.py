"""A plan file whose prediction cannot be."""

import json

import pytest

from evener.core.files import decode
from evener.core.plan import Plan, Prediction
from evener.errors import FileError
from tests.architecture.source import ROOT

EXAMPLE = ROOT / "examples" / "plans" / "finetune.json"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("step_s", 0.0),
        ("step_s", -1.0),
        ("lower_s", -1.0),
        ("upper_s", -0.5),
        ("seconds", {"lab/a": {"compute": -0.2}}),
    ],
)
def test_negative_seconds_are_refused_with_their_place(field: str, value: object) -> None:
    plan = json.loads(EXAMPLE.read_text())
    good = {"step_s": 0.5, "lower_s": 0.4, "upper_s": 0.6, "seconds": {"lab/a": {"compute": 0.5}}}
    plan["prediction"] = good
    assert decode(json.dumps(plan).encode(), Plan, "plan.json").prediction is not None
    plan["prediction"] = good | {field: value}
    with pytest.raises(FileError, match=r"the predicted (.|\n)*\$\.prediction"):
        decode(json.dumps(plan).encode(), Plan, "plan.json")


def test_seconds_that_are_no_number_are_refused() -> None:
    with pytest.raises(ValueError, match="step_s must be positive and finite, got nan"):
        Prediction(step_s=float("nan"), lower_s=1.0, upper_s=1.0)
    with pytest.raises(ValueError, match="wait on lab/a are nan"):
        Prediction(step_s=1.0, lower_s=1.0, upper_s=1.0, seconds={"lab/a": {"wait": float("nan")}})
