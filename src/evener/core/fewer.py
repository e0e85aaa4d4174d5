"""Fewer exchanges between hosts than one a step: three ways, each another mathematics, each allowed by name.

every step      step ═ step ═ step ═ step ═        ═ what hosts tell each other, waited for
accumulate:2    step   step ═ step   step ═        a batch twice as large
delayed         step   step   step   step          ═ goes on beside the next step: it is one step late
                   ═══    ═══    ═══
local:4         step   step   step   step ═        hosts by themselves, then an outer optimiser
"""

from collections.abc import Sequence
from typing import Literal

from evener.core.figures import Value
from evener.errors import UsageError

How = Literal["accumulate", "delayed", "local"]
RATE, MOMENTUM = 1.0, 0.0
"""Of the outer Nesterov SGD: the plain mean of weights. DiLoCo (Douillard et al. 2023, arXiv 2311.08105)
found 0.7 and 0.9 best over hundreds of rounds; over few that overshoots, see docs/log.md."""
MOST = 10_000
SPELLING = "accumulate:4, delayed, local:16 or local:16:0.7:0.9 (steps, outer rate, outer momentum)"


class Fewer(Value, frozen=True, kw_only=True):
    """One way to exchange less often, `every` so many global batches; None leaves the number to the model.

    `rate` and `momentum` are those of the outer SGD of "local": 1 and 0 are the plain mean of weights. `why`
    is the sentence why a plan has it.
    """

    how: How
    every: int | None = None
    rate: float = RATE
    momentum: float = MOMENTUM
    why: str = ""

    def __post_init__(self) -> None:
        if self.how == "delayed" and self.every not in (None, 1):
            raise ValueError("delayed is by one step: it takes no number")
        if self.every is not None and not 1 <= self.every <= MOST:
            raise ValueError(f"{self.how} every {self.every} steps: 1 to {MOST}")
        if not 0 < self.rate <= 10 or not 0 <= self.momentum < 1:
            raise ValueError(
                f"the outer rate {self.rate:g} must be in (0, 10], the momentum {self.momentum:g} in [0, 1)"
            )

    def __str__(self) -> str:
        number = "" if self.every is None or self.how == "delayed" else f":{self.every}"
        outer = f":{self.rate:g}:{self.momentum:g}" if self.how == "local" and number else ""
        return f"{self.how}{number}{outer}"

    @property
    def parts_hosts(self) -> bool:
        """Whether hosts take steps that the others do not take with them: their weights differ meanwhile."""
        return self.how in ("delayed", "local")

    def sentence(self, global_batch: int) -> str:
        """What it does to the mathematics, for a plan whose steps take `global_batch` samples."""
        if self.how == "accumulate":
            return (
                f"one step for every {self.every} global batches, as {global_batch} samples at once would "
                "give it; the learning rate is the one given for the smaller batch"
            )
        if self.how == "delayed":
            return (
                "hosts exchange gradients while the next step computes: each moves by the mean over its own "
                "samples of this batch and the others' of the batch before; the weights of hosts differ by "
                "that, and are averaged by samples at the end"
            )
        return (
            f"hosts train by themselves for {self.every} steps, each on its own samples of every global "
            "batch; then the mean change of weights, by samples, moves all by an outer SGD (Nesterov, rate "
            f"{self.rate:g}, momentum {self.momentum:g})"
        )


def fewer_in(words: Sequence[str]) -> tuple[Fewer, ...]:
    """The ways that `words` allow. UsageError for another spelling, or one way named twice.

    Example: ("delayed", "local:16") allows both, the second every 16 steps with the usual outer optimiser.
    """
    found = tuple(_read(word) for word in words)
    twice = sorted({f.how for f in found if sum(g.how == f.how for g in found) > 1})
    if twice:
        raise UsageError(f"fewer names {', '.join(twice)} twice", remedy=SPELLING)
    return found


def _read(word: str) -> Fewer:
    how, *numbers = word.strip().split(":")
    most = {"accumulate": 1, "delayed": 0, "local": 3}.get(how)
    if most is None or len(numbers) > most:
        raise UsageError(f"cannot read {word!r} as a way to exchange less often", remedy=SPELLING)
    try:
        every = int(numbers[0]) if numbers else None
        rate = float(numbers[1]) if len(numbers) > 1 else RATE
        momentum = float(numbers[2]) if len(numbers) > 2 else MOMENTUM
        return Fewer(how=how, every=every, rate=rate, momentum=momentum)  # type: ignore[arg-type]
    except ValueError as e:
        raise UsageError(f"cannot read {word!r}: {e}", remedy=SPELLING) from e
