"""The verdict on a step: which health wins, and the sentence."""

import pytest

from evener.runtime.agreement import judge
from evener.runtime.tally import ABANDONED, HEALTHY, NON_FINITE, OUT_OF_MEMORY


def test_healthy_devices_apply():
    verdict = judge({"a/0": HEALTHY, "a/1": HEALTHY}, on_non_finite="stop")
    assert (verdict.do, verdict.devices) == ("apply", ())


@pytest.mark.parametrize("choice", ["stop", "skip"])
def test_nan_does_what_the_user_chose(choice):
    verdict = judge({"a/0": HEALTHY, "a/1": NON_FINITE}, on_non_finite=choice)
    assert (verdict.do, verdict.devices) == (choice, ("a/1",))
    assert verdict.reason == "a/1 has a loss that is NaN or infinite"
    both = judge({"a/0": NON_FINITE, "a/1": NON_FINITE}, on_non_finite=choice)
    assert both.reason == "a/0, a/1 have losses that are NaN or infinite"


@pytest.mark.parametrize(
    ("codes", "do", "devices"),
    [
        ((OUT_OF_MEMORY, HEALTHY, OUT_OF_MEMORY), "shrink", ("a/0", "a/2")),
        ((NON_FINITE, ABANDONED, OUT_OF_MEMORY), "shrink", ("a/2",)),
        ((NON_FINITE, ABANDONED, HEALTHY), "skip", ("a/1",)),
    ],
)
def test_memory_comes_before_an_abandoned_step_before_nan(codes, do, devices):
    verdict = judge({f"a/{i}": code for i, code in enumerate(codes)}, on_non_finite="stop")
    assert (verdict.do, verdict.devices) == (do, devices)
    assert verdict.reason.startswith(", ".join(devices))


def test_a_step_of_no_weight_is_skipped_unless_something_worse_happened():
    verdict = judge({"a/0": HEALTHY}, on_non_finite="stop", weight=0.0)
    assert (verdict.do, verdict.devices) == ("skip", ()) and "weight is 0" in verdict.reason
    assert judge({"a/0": OUT_OF_MEMORY}, on_non_finite="stop", weight=0.0).do == "shrink"
