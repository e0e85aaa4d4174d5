"""Hosts made of network namespaces: bridges as switches, shaped links, dead ones. Needs root and iproute2."""

import ctypes
import multiprocessing as mp
import os
import shutil
import subprocess
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from multiprocessing.connection import Connection

import pytest

CLONE_NEWNET = 0x40000000

able = os.name == "posix" and hasattr(os, "geteuid") and os.geteuid() == 0 and shutil.which("tc")
needs_root = pytest.mark.skipif(not able, reason="network namespaces need root and iproute2 (ip, tc)")


def run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"


class Network:
    """Hosts 1, 2, ... on switches; each has docker0, then one interface ethK for each switch K.

    Host i is 10.7K.<pid part>.i on switch K. Everything has this process's id in its name and is gone after
    `close`: the bridges live in a namespace of their own, and with a namespace goes all that is in it.
    """

    def __init__(self, hosts: int, switches: int) -> None:
        self.tag = f"ev{os.getpid()}"
        self.part = os.getpid() % 250 + 1
        self.middle = f"{self.tag}m"
        self.hosts = [f"{self.tag}h{i}" for i in range(1, hosts + 1)]
        self.switches = switches

    def __enter__(self) -> "Network":
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        for name in (*self.hosts, self.middle):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20)

    def _build(self) -> None:
        for name in (self.middle, *self.hosts):
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        for k in range(self.switches):
            run("ip", "-n", self.middle, "link", "add", f"br{k}", "type", "bridge")
            run("ip", "-n", self.middle, "link", "set", f"br{k}", "up")
        for i, host in enumerate(self.hosts, start=1):
            run("ip", "-n", host, "link", "add", "docker0", "type", "bridge")
            run("ip", "-n", host, "addr", "add", "172.17.0.1/16", "dev", "docker0")
            run("ip", "-n", host, "link", "set", "docker0", "up")
            for k in range(self.switches):
                inside, port = f"eth{k}", self.port(i, k)
                run(
                    "ip",
                    "-n",
                    host,
                    "link",
                    "add",
                    inside,
                    "type",
                    "veth",
                    "peer",
                    "name",
                    port,
                    "netns",
                    self.middle,
                )
                run("ip", "-n", host, "addr", "add", f"{self.address(i, k)}/24", "dev", inside)
                run("ip", "-n", host, "link", "set", inside, "up")
                run("ip", "-n", self.middle, "link", "set", port, "master", f"br{k}", "up")

    def port(self, host: int, switch: int) -> str:
        return f"p{host}s{switch}"

    def address(self, host: int, switch: int = 0) -> str:
        return f"10.7{switch}.{self.part}.{host}"

    def shape(self, switch: int, mbit: int) -> None:
        """Every host sends no faster than so many Mbit/s over this switch."""
        for host in self.hosts:
            burst = f"{max(16, mbit // 4)}kb"  # what passes within two milliseconds
            shaper = ["tbf", "rate", f"{mbit}mbit", "burst", burst, "latency", "50ms"]
            run("tc", "-n", host, "qdisc", "replace", "dev", f"eth{switch}", "root", *shaper)

    def kill(self, switch: int) -> None:
        """Nothing passes the switch any more; the hosts' links stay up."""
        run("ip", "-n", self.middle, "link", "set", f"br{switch}", "down")

    def part_pair(self, a: int, b: int, switch: int = 0) -> None:
        """Hosts a and b no longer reach each other over this switch; all others reach both."""
        for host in (a, b):
            run("bridge", "-n", self.middle, "link", "set", "dev", self.port(host, switch), "isolated", "on")

    def start(self, host: int, what: Callable[..., object], *args: object, **environment: str) -> "Running":
        """`what(*args)` in a process of its own on a host; what it prints is kept."""
        return Running(f"/var/run/netns/{self.hosts[host - 1]}", what, args, environment)


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
    with open(place) as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    os.environ.update(environment)
    out, err, code = StringIO(), StringIO(), 0
    with redirect_stdout(out), redirect_stderr(err):
        try:
            what(*args)
        except SystemExit as e:
            code = int(e.code or 0)
    end.send((code, out.getvalue(), err.getvalue()))
    os._exit(0)
