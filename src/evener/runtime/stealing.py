"""A step whose micro-batches are drawn by ticket: a device that is done takes waiting ones of a slower
device.

    taken   counts all tickets of a device's micro-batches; one above the number that wait is void
    back    counts those of helpers, who take from the back; its owner takes from the front

Front and back meet where `taken` says so, so every micro-batch has one taker. The counters are the job's
store's.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from evener.core.actions import Action, of_micro_batch
from evener.core.routes import Piece, Routes
from evener.core.split import spans_of
from evener.core.stealing import Waiting, whom_to_help
from evener.errors import PeerLostError


class Counter(Protocol):
    """Numbers that all devices of a job count up together; a torch.distributed store is one."""

    def add(self, key: str, amount: int) -> int:
        """The number called `key` after adding; it begins at 0."""
        ...


@dataclass(frozen=True, kw_only=True)
class Lot:
    """What one device was given of a step: `sizes` of its micro-batches, and where in the global batch they
    lie.

    All but the last wait to be drawn. `predicted_s` are seconds of a sample on this device.
    """

    device: str
    stage: int
    start: int
    sizes: tuple[int, ...]
    predicted_s: float

    @property
    def num_waiting(self) -> int:
        return max(len(self.sizes) - 1, 0)

    def range_of(self, number: int) -> tuple[int, int]:
        """Half-open range of the global batch. Example: start 6, sizes (4, 4, 2): number 1 is (10, 14)."""
        first, stop = spans_of(self.sizes)[number]
        return self.start + first, self.start + stop


def lots_of(routes: Routes, predicted_s: Mapping[str, float]) -> tuple[Lot, ...]:
    """The lots of a data-parallel step; `predicted_s` are seconds of a sample by device."""
    start, lots = 0, []
    for route in routes.stages:
        (device,) = route.devices
        lots.append(
            Lot(
                device=device,
                stage=route.number,
                start=start,
                sizes=route.sizes,
                predicted_s=predicted_s.get(device, 0.0),
            )
        )
        start += sum(route.sizes)
    return tuple(lots)


class Draw:
    """One device's part of a step in flight: a row that is not known beforehand, and the portions it comes
    to.

    `counter` with keys below `key`, which no other step or try may share; `now` is the device's clock.
    """

    def __init__(
        self, lots: tuple[Lot, ...], here: str, counter: Counter, key: str, now: Callable[[], float]
    ) -> None:
        self.mine = next(lot for lot in lots if lot.device == here)
        self.others = [lot for lot in lots if lot.device != here and lot.num_waiting]
        self._counter, self._key, self._now = counter, key, now
        self._start_s = now()
        self._given: dict[int, tuple[Lot, int]] = {}  # by number here: whose it was, and its number there
        self._lost = 0

    def num_backwards(self, stage: int, device: str) -> int:
        """Micro-batches that this device runs in all, as far as that is known now."""
        return len(self.mine.sizes) - self._lost + len(self._given)

    def samples(self, stage: int, device: str, micro_batch: int) -> int:
        first, stop = self.range_of(stage, micro_batch)
        return stop - first

    def forward_pieces(self, stage: int, micro_batch: int) -> tuple[Piece, ...]:
        return ()

    def backward_pieces(self, stage: int, micro_batch: int) -> tuple[Piece, ...]:
        return ()

    def range_of(self, stage: int, micro_batch: int) -> tuple[int, int]:
        """Where in the global batch this device's micro-batch lies, were it another one's to begin with."""
        lot, number = self._given.get(micro_batch, (self.mine, micro_batch))
        return lot.range_of(number)

    def taken(self, micro_batch: int) -> tuple[Lot, int] | None:
        """Whose micro-batch it was and its number there; None for one of this device's own."""
        return self._given.get(micro_batch)

    @property
    def num_taken(self) -> int:
        """Micro-batches of others that this device took."""
        return len(self._given)

    @property
    def num_lost(self) -> int:
        """Own micro-batches that others took."""
        return self._lost

    def row(self, help_others: Callable[[], bool] = lambda: True) -> Iterator[Action]:
        """The actions, decided while they are done: own ones, then others', the own last one, the sums, the
        step.
        """
        stage, done = self.mine.stage, 0
        while self.mine.num_waiting and self._ticket(self.mine):
            yield of_micro_batch("F", stage, done)
            yield of_micro_batch("B", stage, done)
            done += 1
        self._lost = self.mine.num_waiting - done
        if self.mine.sizes:  # a device without any could not tell which one is its last, so it helps nobody
            while help_others() and self._help():
                number = len(self.mine.sizes) + len(self._given) - 1
                yield of_micro_batch("F", stage, number)
                yield of_micro_batch("B", stage, number)
            yield of_micro_batch("F", stage, len(self.mine.sizes) - 1)
            yield of_micro_batch("B", stage, len(self.mine.sizes) - 1)
        yield Action(type="REDUCE_GRAD", stage=stage)
        yield Action(type="STEP")

    def _help(self) -> bool:
        """Take a micro-batch of the device that needs it most; False when there is none worth taking."""
        elapsed_s = self._now() - self._start_s
        ran = sum(lot.sizes[number] for lot, number in self._given.values())
        ran += sum(self.mine.sizes[: self.mine.num_waiting - self._lost])
        sample_s = elapsed_s / ran if ran else self.mine.predicted_s
        candidates = list(self.others)
        while candidates:
            seen = [self._look(lot) for lot in candidates]
            chosen = whom_to_help(seen, elapsed_s=elapsed_s, sample_s=sample_s, own_last=self.mine.sizes[-1])
            if chosen is None:
                return False
            lot = next(c for c in candidates if c.device == chosen.device)
            if self._ticket(lot):
                place = self._add(f"{lot.device}/back", 1)
                number = len(self.mine.sizes) + len(self._given)
                self._given[number] = (lot, lot.num_waiting - place)
                return True
            candidates.remove(lot)
        return False

    def _look(self, lot: Lot) -> Waiting:
        drawn = self._add(f"{lot.device}/taken", 0)
        return Waiting(
            device=lot.device,
            size=lot.sizes[0],
            last=lot.sizes[-1],
            drawn=min(drawn, lot.num_waiting),
            left=max(lot.num_waiting - drawn, 0),
            predicted_s=lot.predicted_s * lot.sizes[0],
        )

    def _ticket(self, lot: Lot) -> bool:
        return self._add(f"{lot.device}/taken", 1) <= lot.num_waiting

    def _add(self, name: str, amount: int) -> int:
        try:
            return self._counter.add(f"{self._key}/{name}", amount)
        except RuntimeError as e:
            raise PeerLostError(f"the job's store no longer hands out tickets: {e}") from e
