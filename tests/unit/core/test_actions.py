import pytest

from evener.core.actions import Action, parse_action, parse_schedule


@pytest.mark.parametrize(
    "text", ["2F0", "12B3", "0I1", "0W1", "2SEND_F0", "3RECV_B17", "2REDUCE_GRAD", "STEP"]
)
def test_an_action_reads_back(text):
    assert str(parse_action(text)) == text


@pytest.mark.parametrize("text", ["", "F0", "2F", "2X0", "2REDUCE_GRAD1", "0STEP", "2f0", "2F0 "])
def test_what_is_no_action_says_how_one_is_spelt(text):
    with pytest.raises(ValueError, match="write 2F0"):
        parse_action(text)


def test_a_line_without_a_device_is_refused():
    with pytest.raises(ValueError, match="device: actions"):
        parse_schedule("0F0 0B0\n")


def test_a_schedule_reads_back():
    text = "a/0: 0F0 0B0 STEP\na/1: STEP\n"
    schedule = parse_schedule(text)
    assert str(schedule) == text
    assert schedule.actions["a/1"] == (Action(type="STEP"),)
