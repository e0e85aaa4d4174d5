import pytest

from evener.core.faults import Fault, parse_faults
from evener.errors import UsageError


def test_the_text_of_the_documentation():
    script = parse_faults(
        "slow lab1/gpu0 x3 at step 40; leave lab2/gpu1 at 80; join lab3/gpu0 at 120; "
        "cut lab1|lab2 at 150 for 5s; oom lab1/gpu1 at 160"
    )
    assert script.faults == (
        Fault(type="slow", device="lab1/gpu0", factor=3, at_step=40),
        Fault(type="leave", device="lab2/gpu1", at_step=80),
        Fault(type="join", device="lab3/gpu0", at_step=120),
        Fault(type="cut", device="lab1", other="lab2", at_step=150, for_s=5),
        Fault(type="oom", device="lab1/gpu1", at_step=160),
    )


def test_events_are_put_in_order_and_may_lie_inside_a_step():
    assert str(parse_faults("leave a/1 at 9.5\nslow a/0 x2 at 3 for 1.5s;")) == (
        "slow a/0 x2 at 3 for 1.5s; leave a/1 at 9.5"
    )


@pytest.mark.parametrize(
    "text",
    [
        "explode a/0 at 3",
        "slow a/0 at 3",
        "leave a/0 x3 at 3",
        "slow a/0 x0 at 3",
        "cut a at 3 for 1s",
        "cut a|b at 3",
        "leave a/0 at 3 for 1s",
        "leave a/0",
        "leave a/0 at soon",
        "slow a/0 x2 at 3 for 0s",
        "leave a/0 at -1",
    ],
)
def test_a_wrong_event_is_quoted(text):
    with pytest.raises(UsageError, match="fault") as caught:
        parse_faults(f"join b/0 at 1; {text}")
    assert repr(text) in caught.value.what


def test_a_late_step_is_written_as_it_is_read():
    """Step 1,234,567 was written 1.23457e+06: another step, which nothing reads."""
    script = parse_faults("slow lab1/gpu0 x3.1415926 at 1234567.5 for 86400.25s")
    assert parse_faults(str(script)) == script
