"""Do accelerators of one host reach each other's memory, and does data arrive as it was?

Some boards let the driver report direct copies that then deliver other data. `python -m evener.probing.peers
NAME=INDEX ...` copies a pattern between each pair and prints what it saw as JSON: a process apart, so that
nothing else hangs or ends should it do so.
"""

import json
import sys
import time
from collections.abc import Sequence

import msgspec
import torch

from evener.core.fleet import Device
from evener.core.ways import PeerCopy, PeerState
from evener.probing.asking import ask

PATTERN_BYTES = 2**24
REPEATS = 3
ANSWER_S = 6.5


def peer_copies(devices: Sequence[Device], *, answer_s: float = ANSWER_S) -> tuple[tuple[PeerCopy, ...], str]:
    """What copies between the CUDA devices of this host do, and a sentence where it was not found out.

    Nothing is tried for fewer than two. Example: two cards without direct copies give one "staged" pair.
    """
    indexed = [f"{d.name}={d.index}" for d in devices if d.type == "cuda" and d.index is not None]
    if len(indexed) < 2:
        return (), ""
    command = [sys.executable, "-m", "evener.probing.peers", *indexed]
    answer = ask(command, answer_s)
    try:
        return msgspec.json.decode(answer.text, type=tuple[PeerCopy, ...]), ""
    except msgspec.DecodeError:
        why = answer.failure or "no answer"
        return (), f"copies between {', '.join(indexed)} could not be tried: {why}"


class Cards:
    """What the copies need of CUDA: a tensor with a pattern on a card, and a copy of one on another card."""

    def reaches(self, source: int, target: int) -> bool:
        """Whether the driver says that `target` reads the memory of `source`."""
        return torch.cuda.can_device_access_peer(target, source)

    def pattern(self, card: int) -> torch.Tensor:
        return torch.randint(0, 256, (PATTERN_BYTES,), dtype=torch.uint8).to(f"cuda:{card}")

    def copy(self, there: torch.Tensor, target: int) -> torch.Tensor:
        arrived = there.to(f"cuda:{target}")
        torch.cuda.synchronize(target)
        return arrived


def copies_between(devices: Sequence[tuple[str, int]], cards: Cards) -> list[PeerCopy]:
    """Copy a pattern from each device to each other one and see how it arrives; the worse of two ways counts.

    Through host memory the pattern is read back on both sides, so that what differs changed on the way.
    """
    found = []
    for i, (a, index_a) in enumerate(devices):
        for b, index_b in devices[i + 1 :]:
            ways = [_copy(index_a, index_b, cards), _copy(index_b, index_a, cards)]
            state = min((s for s, _ in ways), key=("lies", "staged", "direct").index)
            found.append(PeerCopy(a=a, b=b, state=state, bytes_per_s=min(r for _, r in ways)))
    return found


def _copy(source: int, target: int, cards: Cards) -> tuple[PeerState, float]:
    there = cards.pattern(source)
    best = float("inf")
    for _ in range(REPEATS):
        begin = time.perf_counter()
        arrived = cards.copy(there, target)
        best = min(best, time.perf_counter() - begin)
        if not torch.equal(arrived.cpu(), there.cpu()):
            return "lies", there.nbytes / best
    return ("direct" if cards.reaches(source, target) else "staged"), there.nbytes / best


def main(words: Sequence[str]) -> None:
    """Print the copies between the devices that `words` name, each as NAME=INDEX."""
    devices = [(name, int(index)) for name, _, index in (w.rpartition("=") for w in words)]
    print(json.dumps([msgspec.to_builtins(c) for c in copies_between(devices, Cards())]))


if __name__ == "__main__":
    main(sys.argv[1:])
