"""Hosts made of network namespaces: bridges as switches, shaped links, dead ones. Needs root and iproute2."""

import ctypes
import multiprocessing as mp
import os
import signal
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from multiprocessing.connection import Connection

import pytest

from evener.rehearsal.namespaces import Namespaces, command, enter, missing, tbf, veth

needs_root = pytest.mark.skipif(bool(missing()), reason=f"network namespaces need {missing()}")
MIDDLE = "switches"
_PR_SET_PDEATHSIG = 1


class Network:
    """Hosts 1, 2, ... on switches; each has docker0, then one interface ethK for each switch K.

    Host i is 10.7K.1.i on switch K. All of it is in namespaces without names, which are gone after `close`.
    """

    def __init__(self, hosts: int, switches: int) -> None:
        self.hosts = [f"host {i}" for i in range(1, hosts + 1)]
        self.switches = switches

    def __enter__(self) -> "Network":
        self._namespaces = Namespaces([MIDDLE, *self.hosts])
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._namespaces.close()

    def _run(self, place: str, text: str) -> None:
        self._namespaces.run(command(place, text))

    def _build(self) -> None:
        for place in (MIDDLE, *self.hosts):
            self._run(place, "ip link set lo up")
        for k in range(self.switches):
            self._run(MIDDLE, f"ip link add br{k} type bridge")
            self._run(MIDDLE, f"ip link set br{k} up")
        for i, host in enumerate(self.hosts, start=1):
            self._run(host, "ip link add docker0 type bridge")
            self._run(host, "ip addr add 172.17.0.1/16 dev docker0")
            self._run(host, "ip link set docker0 up")
            for k in range(self.switches):
                self._namespaces.run(veth(host, f"eth{k}", MIDDLE, self.port(i, k)))
                self._run(host, f"ip addr add {self.address(i, k)}/24 dev eth{k}")
                self._run(host, f"ip link set eth{k} up")
                self._run(MIDDLE, f"ip link set {self.port(i, k)} master br{k} up")

    def port(self, host: int, switch: int) -> str:
        return f"p{host}s{switch}"

    def address(self, host: int, switch: int = 0) -> str:
        return f"10.7{switch}.1.{host}"

    def entering(self, host: int) -> list[str]:
        """What goes before a command that is to run on a host."""
        return ["nsenter", f"--net={self._namespaces.path(self.hosts[host - 1])}"]

    def shape(self, switch: int, mbit: int) -> None:
        """Every host sends no faster than so many Mbit/s over this switch."""
        for host in self.hosts:
            self._namespaces.run(tbf(host, f"eth{switch}", 1e6 * mbit))

    def shape_host(self, host: int, switch: int, mbit: int) -> None:
        """A host neither sends nor receives faster than so many Mbit/s over this switch."""
        self._namespaces.run(tbf(self.hosts[host - 1], f"eth{switch}", 1e6 * mbit))
        self._namespaces.run(tbf(MIDDLE, self.port(host, switch), 1e6 * mbit))

    def kill(self, switch: int) -> None:
        """Nothing passes the switch any more; the hosts' links stay up."""
        self._run(MIDDLE, f"ip link set br{switch} down")

    def part(self, host: int, switch: int = 0) -> None:
        """Nothing passes between this host and the others over this switch any more; its link stays up."""
        self._run(MIDDLE, f"ip link set {self.port(host, switch)} nomaster")

    def part_pair(self, a: int, b: int, switch: int = 0) -> None:
        """Hosts a and b no longer reach each other over this switch; all others reach both."""
        for host in (a, b):
            self._run(MIDDLE, f"bridge link set dev {self.port(host, switch)} isolated on")

    def start(self, host: int, what: Callable[..., object], *args: object, **environment: str) -> "Running":
        """`what(*args)` in a process of its own on a host; what it prints is kept."""
        return Running(self._namespaces.path(self.hosts[host - 1]), what, args, environment)


class Running:
    """A process on a host, from a server that has torch loaded already."""

    def __init__(self, place: str, what: Callable[..., object], args: tuple, environment: dict) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["evener.cli.preflight", "evener.session.meeting", "evener.probing"])
        self._end, theirs = context.Pipe(duplex=False)
        self._process = context.Process(target=_on_host, args=(theirs, place, what, args, environment))
        self._process.start()
        theirs.close()

    def finish(self, seconds: float = 60.0) -> tuple[int, str, str]:
        """(exit code, standard output, standard error) when it has ended; it is ended after `seconds`."""
        try:
            assert self._end.poll(seconds), f"no end within {seconds:g} s"
            return self._end.recv()
        finally:
            self._process.kill()
            self._process.join()


def _on_host(
    end: Connection, place: str, what: Callable[..., object], args: tuple, environment: dict
) -> None:
    # Ends with the server of processes, which ends with the one that asked for it.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    enter(place)
    os.environ.update(environment)
    out, err, code = StringIO(), StringIO(), 0
    with redirect_stdout(out), redirect_stderr(err):
        try:
            what(*args)
        except SystemExit as e:
            code = int(e.code or 0)
    end.send((code, out.getvalue(), err.getvalue()))
    os._exit(0)
