"""Which waiting micro-batch a device that is done takes within a step, if any: a decision from what it sees.

    a   0   1   2   3    7     a has eight micro-batches and turns out slow: it takes them from the front,
    b   0   1   2   a6   a5   a4   3            b, done with its own, from the back

Each device keeps its last one to itself (a 7, b 3), so that it knows when its sums may leave while it still
computes.
"""

from collections.abc import Sequence

from evener.core.figures import Value


class Waiting(Value, frozen=True, kw_only=True):
    """Another device's micro-batches of this step: `size` samples each, `last` samples in the one it keeps.

    `drawn` were taken up to now by anybody, `left` wait; `predicted_s` is what the plan expects of one.
    """

    device: str
    size: int
    last: int
    drawn: int
    left: int
    predicted_s: float


def seconds_left(waiting: Waiting, elapsed_s: float) -> float:
    """Seconds until the device would be done if nothing changed, `elapsed_s` into the step.

        (left + last / size) · elapsed_s / (drawn - 1/2)

    as the newest one drawn is half done on average. Before the second one is drawn, the pace is the larger of
    what was predicted and what the first has taken up to now. Example: 3 drawn after 5 s, 4 left, one more of
    the same size kept: 5 · 5 / 2.5 = 10 s.
    """
    pace_s = max(waiting.predicted_s, elapsed_s)
    if waiting.drawn > 1:
        pace_s = elapsed_s / (waiting.drawn - 0.5)
    return (waiting.left + waiting.last / waiting.size) * pace_s


def whom_to_help(
    others: Sequence[Waiting], *, elapsed_s: float, sample_s: float, own_last: int
) -> Waiting | None:
    """The device that needs longest among those that end earlier with a micro-batch less; None to stop.

    A micro-batch is taken only where its taker (`sample_s` seconds a sample, `own_last` samples still to do)
    is done with it and its own last one no later than the other would be without help:

        (size + own_last) · sample_s ≤ seconds_left

    Without that a slow device would take its step's last micro-batch from a fast one and let all wait.
    Example: 10 s left for a, micro-batches of 4 samples; a taker of 1.5 s a sample with 2 samples of its own
    needs 9 s and helps, one of 2 s a sample does not.
    """
    ends = [(seconds_left(w, elapsed_s), w) for w in others if w.left > 0]
    worth = [(end, w) for end, w in ends if (w.size + own_last) * sample_s <= end]
    return max(worth, key=lambda pair: pair[0])[1] if worth else None
