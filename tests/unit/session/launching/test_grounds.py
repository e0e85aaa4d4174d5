"""Real links are refused with what is missing, and what works without."""

import pytest

from evener.core.figures import line
from evener.core.fleet import Device, Fleet, Link
from evener.errors import EnvironmentBrokenError, UsageError
from evener.session.launching import grounds
from evener.session.launching.grounds import check_real_links, grounds_of
from evener.session.request import Request

FLEET = Fleet(
    devices=(Device(name="a/0", kind="k"), Device(name="b/0", kind="k")),
    links=(Link(a="a", b="b", curve=line(1e-3, 12.5e6)),),
)


def request(**more) -> Request:
    return Request(**{"fleet": FLEET, "run_dir": "run", "rehearse": True, "real_links": True} | more)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"rehearse": False}, "nothing is rehearsed"),
        ({"open_at": "0.0.0.0:4711"}, "--open-at"),
        ({"fleet": FLEET.only(("a/0",))}, "the fleet has 1"),
    ],
)
def test_what_does_not_go_together(wrong: dict, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        check_real_links(request(**wrong))


def test_not_under_torchrun(monkeypatch) -> None:
    monkeypatch.setattr(grounds, "world_size_here", lambda: 2)
    with pytest.raises(UsageError, match="torchrun"):
        check_real_links(request())


def test_what_this_machine_lacks_is_named_with_what_works_without_it(monkeypatch) -> None:
    monkeypatch.setattr(grounds, "missing", lambda: "root, tc (iproute2)")
    with pytest.raises(EnvironmentBrokenError, match="root, tc") as caught, grounds_of(request()):
        pass
    assert "--rehearse without --real-links" in caught.value.remedy


def test_without_the_option_everything_is_here() -> None:
    with grounds_of(request(real_links=False, open_at="127.0.0.1:0")) as here:
        assert here.host == "127.0.0.1"
        assert (here.place(FLEET.devices[0]), here.variables(), here.takes_others) == ("", {}, True)
