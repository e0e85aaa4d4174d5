"""One device's end of all its pairs: a transport per peer, opened when first used."""

import os
import secrets
import threading
import weakref
from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist

from evener.core.seams import Pending
from evener.errors import EnvironmentBrokenError, EvenerError, UnknownNameError
from evener.runtime.channels import places
from evener.runtime.channels.doors import TOKEN_CHARS, Door
from evener.runtime.channels.local import Hub, LocalTransport
from evener.runtime.channels.messages import Message
from evener.runtime.channels.places import Place, choose_transport
from evener.runtime.channels.problems import mismatch
from evener.runtime.channels.shared import IS_AVAILABLE, SharedTransport
from evener.runtime.channels.stop import Stop
from evener.runtime.channels.tcp import TcpTransport
from evener.runtime.ranks import Ranks

TIMEOUT_S = 60.0
# Looking for a message so long before sleeping saves a wake-up, which costs a step with almost no compute a
# seventh; for less long where devices may have to share a processor's cores.
LOOK_S, SHORT_LOOK_S = 4e-4, 1e-4


class Sender(Protocol):
    """The way to one other device."""

    def send(self, tensors: tuple[torch.Tensor, ...], key: str) -> Pending:
        """Start sending; never waits for the other end."""
        ...


class Receiver(Protocol):
    """The way from one other device."""

    def take(self, key: str, device: torch.device) -> Message:
        """The next message; `key` is what it should be, for errors."""
        ...


class Transport(Protocol):
    """One way to exchange messages with some of the others."""

    def sender(self, to: Place) -> Sender:
        """Open the way to a device."""
        ...

    def receiver(self, source: Place) -> Receiver:
        """Open the way from a device."""
        ...

    def close(self) -> None:
        """Let go of everything; nobody waits any more."""
        ...

    def close_sockets(self) -> None:
        """Let go of the sockets alone, in a forked child."""
        ...


class JobChannel:
    """A `Channel` that picks the transport by where the two devices run; used by one thread.

    `find(device)` says where another device runs. Raises PeerLostError for a peer that left (at once) or did
    nothing for the timeout, ReductionMismatchError where the two ends name different actions. `abort` and
    `close` may be called by any thread: all waits then end at once.
    """

    def __init__(
        self, here: Place, transports: dict[str, Transport], find: Callable[[str], Place], stop: Stop
    ) -> None:
        self.here = here.device
        self.reasons: dict[str, str] = {}
        self._place, self._transports, self._find, self._stop = here, transports, find, stop
        self._senders: dict[str, Sender] = {}
        self._inboxes: dict[str, _Inbox] = {}
        self._using = threading.RLock()  # held while this channel works, so that nothing is closed under it
        self._is_open = True
        _open_channels.add(self)

    def send(self, tensors: tuple[torch.Tensor, ...], to: str, key: str) -> Pending:
        """Start sending `tensors` to `to`; see `Channel.send` in `core/seams.py`."""
        with self._using:
            self._stop.check()
            sender = self._senders.get(to)
            if sender is None:
                place, transport = self._open(to)
                sender = self._senders[to] = transport.sender(place)
            return sender.send(tensors, key)

    def receive(self, source: str, key: str, *, device: torch.device | str) -> "Awaited":
        """Expect a message; see `Channel.receive` in `core/seams.py`."""
        inbox = self._inboxes.get(source)
        if inbox is None:
            with self._using:
                self._stop.check()
                place, transport = self._open(source)
                shared = self._transports.get("shared")
                drain = (
                    shared.drain if isinstance(shared, SharedTransport) and shared is not transport else None
                )
                receiver = transport.receiver(place)
                inbox = self._inboxes[source] = _Inbox(self.here, source, receiver, drain, self._using)
        return inbox.expect(key, torch.device(device))

    def abort(self, reason: str) -> None:
        """End every wait, now and later, with a PeerLostError that says `reason`; from any thread.

        Example: abort("lab1/b has shown no sign of life for 1 s").
        """
        self._stop.set(reason, "look for the first error of the other devices; the job can be started again")

    def close(self) -> None:
        """Let go of sockets, memory and threads; from any thread, whose other waits end with PeerLostError.

        What `send` gave back must have been waited for.
        """
        self._stop.set(f"{self.here} has closed its channel", "")
        with self._using:
            if self._is_open:
                self._is_open = False
                for transport in self._transports.values():
                    transport.close()
                self._stop.close()
            self._senders.clear()
            self._inboxes.clear()

    def close_sockets(self) -> None:
        """In a forked child: keep none of the parent's sockets open."""
        for transport in self._transports.values():
            transport.close_sockets()

    def _open(self, peer: str) -> tuple[Place, Transport]:
        place = self._find(peer)
        name, self.reasons[peer] = choose_transport(self._place, place)
        if name == "tcp" and self._place.host != place.host:
            for end in (self._place, place):
                if not end.is_reachable_from_afar:
                    raise EnvironmentBrokenError(
                        f"{end.device} has no address that other hosts can reach",
                        numbers=f"{end.door or 'none'}; {self.reasons[peer]}",
                        remedy="MASTER_ADDR as all hosts see it, or GLOO_SOCKET_IFNAME on each host",
                    )
        return place, self._transports[name]


_open_channels: "weakref.WeakSet[JobChannel]" = weakref.WeakSet()


def _close_in_child() -> None:
    """A forked child, such as a loader's worker, must not keep the sockets of a killed parent open."""
    for channel in list(_open_channels):
        channel.close_sockets()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


class _Inbox:
    """Messages from one device, and who awaits them.

    A device that holds several stages may send 1SEND_F2 before 1SEND_B1 while this one needs them the other
    way round, so what comes early within a step is kept. A message of another step is an error at once.
    """

    def __init__(
        self,
        here: str,
        source: str,
        receiver: Receiver,
        drain: Callable[[], None] | None,
        using: threading.RLock,
    ) -> None:
        self._here, self._source, self._receiver, self._drain = here, source, receiver, drain
        self._using = using
        self._awaited: dict[str, Awaited] = {}
        self._early: dict[str, Message] = {}
        self._error: EvenerError | None = None

    def expect(self, key: str, device: torch.device) -> "Awaited":
        awaited = self._awaited[key] = Awaited(self, key, device)
        return awaited

    def advance(self, key: str) -> None:
        """Take the next message; it is the one called `key`, or comes early."""
        if self._error:
            raise self._error
        if self._drain:
            self._drain()
        try:
            with self._using:
                message = self._early.pop(key, None) or self._receiver.take(key, self._awaited[key].device)
            if _round_of(message.key) != _round_of(key) or message.key in self._early:
                raise mismatch(self._here, key, self._source, message.key)
        except EvenerError as e:
            self._error = e  # something is missing: nothing that follows can be trusted
            raise
        awaited = self._awaited.pop(message.key, None)
        if awaited is None:
            self._early[message.key] = message
        else:
            awaited.sent_s, awaited.tensors = message.sent_s, message.tensors


def _round_of(key: str) -> str:
    """What messages may overtake each other in. Example: "1SEND_F2 of step 3" gives "step 3"."""
    return key.partition(" of ")[2]


class Awaited:
    """A message to come. `sent_s` is known after `wait`: when it left, None where clocks differ."""

    def __init__(self, inbox: _Inbox, key: str, device: torch.device) -> None:
        self._inbox = inbox
        self.key, self.device = key, device
        self.sent_s: float | None = None
        self.tensors: tuple[torch.Tensor, ...] | None = None

    def wait(self) -> tuple[torch.Tensor, ...]:
        """The tensors, in new memory on the device asked for; the second call gives the same."""
        while self.tensors is None:
            self._inbox.advance(self.key)
        return self.tensors


def open_channel(
    ranks: Ranks,
    store: dist.Store | None = None,
    *,
    host: str = "127.0.0.1",
    hub: Hub | None = None,
    timeout_s: float = TIMEOUT_S,
) -> JobChannel:
    """The channel of the device `ranks.here` to the others of `ranks.devices`.

    Each device tells its place through `store`, which is for this opening alone (a PrefixStore each time);
    pairs are opened when first used. `host` is the IP address at which other hosts reach this one. Devices of
    one process share a `hub`. Without `store` all devices are in this process. `timeout_s` is how long a peer
    may do nothing: longer than the slowest action. UnknownNameError for a device that is not of the job.
    """
    hub, stop, token = hub or Hub(), Stop(), secrets.token_hex(TOKEN_CHARS // 2)
    transports: dict[str, Transport] = {"local": LocalTransport(ranks.here, hub, timeout_s, stop)}
    address = door_address = ""
    if store is not None:
        door = Door(host, token)
        look_s = LOOK_S if len(ranks.devices) <= (os.cpu_count() or 1) else SHORT_LOOK_S
        tcp = TcpTransport(token, door, timeout_s, look_s, stop)
        transports["tcp"], door_address = tcp, door.address
        if IS_AVAILABLE:
            shared = SharedTransport(ranks.here, timeout_s, look_s, stop)
            transports["shared"], address = shared, shared.address
    here = Place(
        device=ranks.here,
        process=hub.process,
        host=places.this_host(),
        address=address,
        door=door_address,
        token=token,
    )
    if store is not None:
        places.announce(here, store)

    def find(device: str) -> Place:
        if device not in ranks.devices or device == ranks.here:
            raise UnknownNameError(
                f"{ranks.here} has no channel to {device}", remedy=f"one of: {', '.join(ranks.devices)}"
            )
        if store is None:
            return Place(device=device, process=hub.process, host="", address="", door="", token="")
        return places.find(device, store, timeout_s, stop.check)

    return JobChannel(here, transports, find, stop)
