"""When a run saves: the spelling and the decision."""

import pytest

from evener.errors import UsageError
from evener.session.checkpoints.save_rule import Keep, Rule, rule_of


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (200, Rule(steps=200)),
        ("200", Rule(steps=200)),
        ("90s", Rule(seconds=90.0)),
        (" 1.5 min ", Rule(seconds=90.0)),
        ("2h", Rule(seconds=7200.0)),
    ],
)
def test_the_spelling(text: str | int, rule: Rule) -> None:
    assert rule_of(text) == rule


@pytest.mark.parametrize("text", ["", "0", "-3", "often", "0s", "1.5", "s", "nans", "5 days"])
def test_what_is_no_rule(text: str) -> None:
    with pytest.raises(UsageError) as e:
        rule_of(text)
    assert e.value.code == "EV103"


def test_by_steps() -> None:
    rule = Rule(steps=20)
    assert [n for n in range(61) if rule.is_due(n, 1e9)] == [20, 40, 60]


def test_by_time() -> None:
    rule = Rule(seconds=30.0)
    assert not rule.is_due(1000, 29.9) and rule.is_due(1, 30.0)


def test_something_is_kept() -> None:
    for wrong in ({"last": 0}, {"last": 3, "every": -1}):
        with pytest.raises(UsageError, match="at least the last"):
            Keep(**wrong)
