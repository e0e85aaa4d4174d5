"""Network namespaces without names, which stand for hosts: they are gone with the process that made them.

    this process ──holds open──► namespace "lab1" ◄──lives in── processes of lab1's devices
                 └─holds open──► namespace "switches"

A namespace lives as long as something holds it. Nothing has a name under /var/run/netns, so nothing is left
behind: not after an error, not after Ctrl-C, not after SIGKILL.
"""

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence

from evener.core.figures import Value
from evener.errors import EnvironmentBrokenError

_CLONE_NEWNET = 0x40000000
_COMMAND_S = 20.0
TOOLS = ("ip", "tc")
USER: Callable[[], int] | None = getattr(os, "geteuid", None)
BURST_S = 2e-3
"""So long a shaped link passes bytes unshaped after a rest; shorter costs the kernel more wake-ups."""
LEAST_BURST_BYTES = 3_200  # two packets of a network card: less than one would never pass
QUEUE_S, LEAST_QUEUE_BYTES = 0.1, 64_000  # what waits before a shaped link; beyond that TCP loses packets


class Command(Value, frozen=True, kw_only=True):
    """A command to run in the namespace `place`; a word after "netns" names another one."""

    place: str
    words: tuple[str, ...]


def command(place: str, text: str) -> Command:
    """The words of `text` as a command; none of them comes from a file. Example: ("a", "ip link show")."""
    return Command(place=place, words=tuple(text.split()))


def veth(place: str, inside: str, other: str, port: str) -> Command:
    """A cable from `inside` in one namespace to `port` in another."""
    words = ("ip", "link", "add", inside, "type", "veth", "peer", "name", port, "netns", other)
    return Command(place=place, words=words)


def tbf(place: str, interface: str, bits_per_s: float) -> Command:
    """Packets leave by `interface` at no more than `bits_per_s`, headers included.

    Example: 100 Mbit/s has a burst of 25,000 bytes and a queue of 1.25 MB.
    """
    bytes_per_s = bits_per_s / 8
    burst = max(LEAST_BURST_BYTES, round(BURST_S * bytes_per_s))
    queue = max(LEAST_QUEUE_BYTES, round(QUEUE_S * bytes_per_s))
    shape = f"tbf rate {max(8, round(bits_per_s))}bit burst {burst} limit {queue}"
    return command(place, f"tc qdisc replace dev {interface} root handle 1: {shape}")


def missing(
    *,
    system: str = sys.platform,
    user: Callable[[], int] | None = USER,
    which: Callable[[str], str | None] = shutil.which,
) -> str:
    """What namespaces with shaped links lack here, in words; empty where they can be made.

    Example: a user on a Linux machine without tc: "root, tc (iproute2)".
    """
    if system != "linux":
        return "Linux"
    lacks = [] if user is not None and user() == 0 else ["root"]
    return ", ".join([*lacks, *(f"{tool} (iproute2)" for tool in TOOLS if which(tool) is None)])


class Namespaces:
    """One network namespace for each of `names`, until `close` or the end of this process.

    EnvironmentBrokenError where they cannot be made, or a command in one of them fails.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._files: dict[str, int] = {}
        try:
            for name in names:
                self._files[name] = _new()
        except OSError as e:
            self.close()
            raise EnvironmentBrokenError(
                f"this process may not make a network namespace: {e}",
                numbers=f"{len(names)} wanted",
                remedy="root with CAP_SYS_ADMIN and CAP_NET_ADMIN; in a container, a privileged one",
            ) from e

    def __enter__(self) -> "Namespaces":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of all: each ends with the last process in it."""
        while self._files:
            os.close(self._files.popitem()[1])

    def path(self, name: str) -> str:
        """A path by which processes of this machine `enter` namespace `name`, while this process lives."""
        return f"/proc/{os.getpid()}/fd/{self._files[name]}"

    @contextlib.contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """The calling thread is in namespace `name`: what it opens and starts is and stays there."""
        own = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            _join(self._files[name])
            try:
                yield
            finally:
                _join(own)
        finally:
            os.close(own)

    def run(self, wanted: Command) -> None:
        """Run a command, without a shell, in its namespace."""
        before = ("", *wanted.words)
        words = [self.path(w) if b == "netns" else w for b, w in zip(before, wanted.words, strict=False)]
        with self.inside(wanted.place):
            try:
                done = subprocess.run(words, capture_output=True, text=True, timeout=_COMMAND_S)
            except (OSError, subprocess.TimeoutExpired) as e:
                raise EnvironmentBrokenError(f"{words[0]} does not run: {e}") from e
        if done.returncode:
            raise EnvironmentBrokenError(
                f"{' '.join(wanted.words)} failed: {done.stderr.strip()[:500]}",
                numbers=f"exit code {done.returncode}, for {wanted.place}",
                remedy="a kernel with veth, bridge and sch_tbf",
            )


def enter(path: str) -> None:
    """The calling thread, and threads and processes that it starts later, live in the namespace at `path`."""
    namespace = os.open(path, os.O_RDONLY)
    try:
        _join(namespace)
    finally:
        os.close(namespace)


def _new() -> int:
    """A new namespace, held open; the calling thread stays where it is."""
    own = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        _checked(ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET), "unshare")
        try:
            return os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        finally:
            _join(own)
    finally:
        os.close(own)


def _join(namespace: int) -> None:
    _checked(ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNET), "setns")


def _checked(result: int, what: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
