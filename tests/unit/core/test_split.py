"""How people write samples by device."""

import pytest

from evener.core.fleet import Device, Fleet
from evener.core.split import split_of
from evener.errors import UnknownNameError, UsageError

FLEET = Fleet(devices=(Device(name="lab1/a", kind="k"), Device(name="lab1/b", kind="k")))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("lab1/a=2,lab1/a=48", "names lab1/a more than once"),
        ("2,lab1/b=3", "cannot read"),
        ("1,1.5", "cannot read"),
        (",", "cannot read"),
        ("1,2,3", "3 numbers for 2 devices"),
    ],
)
def test_what_says_no_split_is_refused(text: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        split_of(text, FLEET)


def test_another_device_is_named() -> None:
    with pytest.raises(UnknownNameError, match="lab1/c"):
        split_of("lab1/c=2", FLEET)
