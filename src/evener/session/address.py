"""At which address other hosts of a job reach this one: where its own way to the job's first host begins."""

import os
import socket
import struct
import sys
from collections.abc import Mapping
from ipaddress import ip_address

import psutil

from evener.errors import EnvironmentBrokenError

_ELSEWHERE = "192.0.2.1"  # set aside for documentation (RFC 5737): nothing is sent there
_SIOCGIFADDR = 0x8915


def address_here(environment: Mapping[str, str]) -> str:
    """This host's IP address for the job that `environment` describes; a loopback one for a job of one host.

    GLOO_SOCKET_IFNAME names the interface, as for the sums; else the way to MASTER_ADDR decides.
    EnvironmentBrokenError for an interface without an address.

    Example: MASTER_ADDR=10.0.0.1 from a host whose address in that net is 10.0.0.7 gives 10.0.0.7.
    """
    interface = environment.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    if interface and sys.platform == "linux":
        return _address_of(interface)
    master = environment.get("MASTER_ADDR", "localhost")
    found = _way_to(master)
    # A host may know its own name as a loopback address; the others know it as another one.
    if ip_address(found).is_loopback and not _says_loopback(master):
        found = _way_to(_ELSEWHERE)
    return found


def choose_interface() -> None:
    """Let Gloo of this process use the interface that reaches the job, unless the user named one."""
    name = gloo_interface(os.environ)
    if name:
        os.environ["GLOO_SOCKET_IFNAME"] = name


def gloo_interface(environment: Mapping[str, str]) -> str | None:
    """The interface with this host's address for the job; None where Gloo's own choice or the user's does.

    Without one Gloo looks up the host's name, which is often a loopback address that no other host reaches.
    """
    if "GLOO_SOCKET_IFNAME" in environment or _says_loopback(environment.get("MASTER_ADDR", "localhost")):
        return None
    here = address_here(environment)
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.family == socket.AF_INET and a.address == here for a in addresses):
            return name
    return None


def _address_of(interface: str) -> str:
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            wanted = struct.pack("256s", interface.encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, wanted)[20:24])
        except OSError as e:
            names = ", ".join(name for _, name in socket.if_nameindex())
            raise EnvironmentBrokenError(
                f"the network interface {interface!r} of GLOO_SOCKET_IFNAME has no IPv4 address: {e}",
                numbers=f"interfaces: {names}",
                remedy="the name of one that the other hosts can reach",
            ) from e


def _way_to(host: str) -> str:
    """The local address of a datagram to `host`, which is not sent; loopback where there is no way."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"


def _says_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
