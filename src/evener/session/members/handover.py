"""State goes from a device that has it to one that is to hold it, as messages between the two.

The names of what is in a message travel through the store: an optimiser that has not moved yet keeps
nothing, and only its owner knows.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from evener.core.figures import Value
from evener.core.seams import Channel
from evener.session.meeting import Meeting

State = dict[str, Tensor]
Move = tuple[str, str, str]  # (name, from, to)


class Contents(Value, frozen=True, kw_only=True):
    """The full names of the tensors that follow, by the name they belong to."""

    names: dict[str, tuple[str, ...]]


def hand_over(
    moves: Sequence[Move],
    here: str,
    state_of: Callable[[str], State],
    channel: Channel,
    room: Meeting,
    round_name: str,
) -> dict[str, State]:
    """Send what `moves` takes from this device, and return what they bring it, by name.

    `state_of(name)` is this device's state of a parameter or buffer. Called by everyone in `moves` with the
    same moves. Raises PeerLostError when a device is lost meanwhile.
    """
    sent, sends = _contents(moves, here, state_of), []
    for target, states in sent.items():
        room.put(f"contents/{here}>{target}", Contents(names={n: tuple(s) for n, s in states.items()}))
        for name, state in states.items():
            sends += _send(channel, target, name, list(state.values()), round_name)
    came: dict[str, State] = {}
    for source in dict.fromkeys(s for _, s, target in moves if target == here):
        contents = room.get(f"contents/{source}>{here}", Contents).names
        for name, full in contents.items():
            tensors = _receive(channel, source, name, len(full), round_name)
            came[name] = dict(zip(full, tensors, strict=True))
    for pending in sends:
        pending.wait()
    return came


def _contents(
    moves: Sequence[Move], here: str, state_of: Callable[[str], State]
) -> dict[str, dict[str, State]]:
    found: dict[str, dict[str, State]] = {}
    for name, source, target in moves:
        if source == here:
            found.setdefault(target, {})[name] = state_of(name)
    return found


def _send(channel: Channel, target: str, name: str, tensors: list[Tensor], round_name: str) -> list:
    # A state of thousands of tensors would not fit one header, and one tensor a message is simple.
    return [
        channel.send((t.detach().cpu(),), target, _key(name, i, round_name)) for i, t in enumerate(tensors)
    ]


def _receive(channel: Channel, source: str, name: str, count: int, round_name: str) -> list[Tensor]:
    return [channel.receive(source, _key(name, i, round_name), device="cpu").wait()[0] for i in range(count)]


def _key(name: str, number: int, round_name: str) -> str:
    """Names of any length are cut: the order of messages says the rest."""
    return f"state {name[-120:]} {number} of {round_name}"
