"""How long one pipeline takes for its micro-batches under 1F1B, for stages of any length.

stage 0   F0 F1 F2 .. .. B0 F3 B1 F4 B2 .. B3 .. B4        in flight on stage s of S: at most S - s
stage 1   .. F0 F1 .. B0 F2 B1 F3 B2 F4 B3 .. B4
stage 2   .. .. F0 B0 F1 B1 F2 B2 F3 B3 F4 B4
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

EXACT_ACTIONS = 4_000
"""Above this many actions the steady state is continued instead of played out."""


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """Seconds of a stage: one full micro-batch and the smaller last one, and its fixed start.

    `send_s` is the time to the next stage, one way; the gradient on its way back takes as long.
    """

    forward_s: float
    backward_s: float
    send_s: float = 0.0
    last_forward_s: float | None = None
    last_backward_s: float | None = None
    last_send_s: float | None = None
    start_s: float = 0.0

    @property
    def work_s(self) -> float:
        return self.forward_s + self.backward_s


def one_f_one_b(stages: Sequence[StageTimes], micro_batches: int) -> list[float]:
    """Seconds at which each stage ends its last backward; their maximum is the makespan.

    Each action starts when its data is there and its stage is free. Without transfers this is at most
    Σ t + (m - 1)·max t, and just that when the longest stage comes last. Example: stages of 6 and 6
    (devices of 1 and 3 a layer, cut 6 + 2), 8 micro-batches: 54.
    """
    return list(_ends(tuple(stages), micro_batches))


@lru_cache(maxsize=4096)
def _ends(stages: tuple[StageTimes, ...], micro_batches: int) -> tuple[float, ...]:
    """`one_f_one_b`, remembered: large plans have many pipelines that are alike."""
    if len(stages) == 1:
        only = stages[0]
        last = (only.forward_s if only.last_forward_s is None else only.last_forward_s) + (
            only.backward_s if only.last_backward_s is None else only.last_backward_s
        )
        return (only.start_s + (micro_batches - 1) * only.work_s + last,)
    most = max(8 * len(stages) + 8, EXACT_ACTIONS // (2 * len(stages)))
    if micro_batches <= most:
        return tuple(_play(stages, micro_batches))
    seconds, length = _critical(stages)
    left = -(-(micro_batches - most) // length)
    return tuple(end + left * length * seconds for end in _play(stages, micro_batches - left * length))


def _play(stages: Sequence[StageTimes], micro_batches: int) -> list[float]:
    count, m = len(stages), micro_batches
    forward = [s.forward_s for s in stages]
    backward = [s.backward_s for s in stages]
    send = [s.send_s for s in stages]
    last_forward = [s.forward_s if s.last_forward_s is None else s.last_forward_s for s in stages]
    last_backward = [s.backward_s if s.last_backward_s is None else s.last_backward_s for s in stages]
    last_send = [s.send_s if s.last_send_s is None else s.last_send_s for s in stages]
    free = [s.start_s for s in stages]
    came_back = [0.0] * count  # when the backward last played on a stage ended
    for i in range(m + count):
        for s in range(count):
            j = i - (count - s)
            if not 0 <= j < m:
                continue
            end = j == m - 1
            ready = 0.0
            if s + 1 < count:
                ready = came_back[s + 1] + (last_send[s] if end else send[s])
            free[s] = max(free[s], ready) + (last_backward[s] if end else backward[s])
            came_back[s] = free[s]
        if i < m:
            end = i == m - 1
            arrived = 0.0
            for s in range(count):
                free[s] = max(free[s], arrived) + (last_forward[s] if end else forward[s])
                arrived = free[s] + (last_send[s] if end else send[s])
    return free


def held_at_both_ends(stages: Sequence[StageTimes]) -> tuple[StageTimes, ...]:
    """The same stages where a transfer holds its sender and its receiver until it is through.

    Its seconds count as work of both; as the two run at once, the next stage's begins that much before the
    sender is free: a send of negative seconds. Example: stages of 1 + 2 s and 2 + 4 s, a link of 1 s, one
    micro-batch: 1 + 1 + 2 + 4 + 1 + 2 = 11 s.
    """
    made = []
    sends = [(0.0, 0.0), *((s.send_s, _last_send_s(s)) for s in stages[:-1]), (0.0, 0.0)]
    for s, before, after in zip(stages, sends, sends[1:], strict=False):
        full, last = before[0] + after[0], before[1] + after[1]
        made.append(
            StageTimes(
                forward_s=s.forward_s + full,
                backward_s=s.backward_s + full,
                send_s=-after[0],
                last_forward_s=(s.forward_s if s.last_forward_s is None else s.last_forward_s) + last,
                last_backward_s=(s.backward_s if s.last_backward_s is None else s.last_backward_s) + last,
                last_send_s=-after[1],
                start_s=s.start_s,
            )
        )
    return tuple(made)


def _last_send_s(stage: StageTimes) -> float:
    return stage.send_s if stage.last_send_s is None else stage.last_send_s


def _critical(stages: Sequence[StageTimes]) -> tuple[float, int]:
    """Seconds between two micro-batches in the steady state, and micro-batches after which that repeats.

        max over stages a..b of (Σ t + 2·Σ send) / (b - a + 1)

    One micro-batch more is in flight on each stage before, so a round trip through a..b returns b - a + 1
    of them.
    Example: two stages of 3 s and a link of 1 s: max(3, (6 + 2) / 2) = 4 s, every 2 micro-batches.
    """
    best, length = 0.0, 1
    for a in range(len(stages)):
        total = 0.0
        for b in range(a, len(stages)):
            total += stages[b].work_s + (2 * stages[b - 1].send_s if b > a else 0.0)
            if total > best * (b - a + 1):
                best, length = total / (b - a + 1), b - a + 1
    return best, length
