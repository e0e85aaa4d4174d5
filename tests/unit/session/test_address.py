"""Which address this host tells the others."""

import pytest

from evener.errors import EnvironmentBrokenError
from evener.session import address
from evener.session.address import address_here


@pytest.mark.parametrize("master", [None, "localhost", "127.0.0.1", "127.0.0.2"])
def test_a_job_of_one_host_stays_on_loopback(master: str | None) -> None:
    assert address_here({"MASTER_ADDR": master} if master else {}).startswith("127.0.0.")


def test_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "_way_to", lambda host: {"::1": "::1"}[host])
    assert address_here({"MASTER_ADDR": "::1"}) == "::1"


def test_the_way_to_the_first_host_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "_way_to", lambda host: {"10.0.0.1": "10.0.0.7"}[host])
    assert address_here({"MASTER_ADDR": "10.0.0.1"}) == "10.0.0.7"


def test_a_name_that_is_loopback_here_is_another_address_to_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ways = {"lab1": "127.0.1.1", "192.0.2.1": "10.0.0.1"}
    monkeypatch.setattr(address, "_way_to", lambda host: ways[host])
    assert address_here({"MASTER_ADDR": "lab1"}) == "10.0.0.1"


def test_an_interface_can_be_named() -> None:
    assert address_here({"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "10.0.0.1"}) == "127.0.0.1"
    with pytest.raises(EnvironmentBrokenError, match="interface 'nix0' of GLOO_SOCKET_IFNAME"):
        address_here({"GLOO_SOCKET_IFNAME": "nix0"})
