"""Bytes of a device that runs a stage whose parameters, or whose optimiser, live on the host.

                  on the device
host-optimizer    parameters, gradients, activations
host              two layers' parameters and, in backward, two layers' gradients; activations; buffers
"""

import numpy as np

from evener.core.residence import run_whole
from evener.cost.memory import ModelBytes


def resident_peaks(
    data: ModelBytes,
    names: list[str],
    samples: int,
    in_flight: int,
    residence: str,
    *,
    recompute: bool = False,
) -> np.ndarray:
    """Entry (i, j): the most that a device holds of layers i..j-1 with `samples` of each micro-batch.

    With "host-optimizer" what it holds anyhow less the state and what its step takes. With "host", while
    layer k runs backward:

        saved up to it + its work + P_k + max(P_(k-1) + G_k + G_(k+1), P_(k+1)) + buffers and what stays

    where k-1 and k+1 are the nearest layers that have parameters, and G_k counts twice (as it is made, and
    on its way) where nobody counted what the layer's work takes on a device.

    Example: three layers of 100 bytes of parameters and of gradients that save 10 each, one sample: the last
    holds 30 + 100 + 100 + 100 (nothing is behind it), the middle one 20 + 100 + 100 + 200 = 420.
    """
    if residence == "host-optimizer":
        steps = np.arange(data.num_layers + 1)
        i, j = steps[:, None], steps[None, :]
        acts = data.fixed(i, j) - (data.optimizer[j] - data.optimizer[i])
        more = 0 if recompute else in_flight - 1
        acts = acts + more * (data.kept[j] - data.kept[i])
        return acts + samples * data.per_sample(i, j, in_flight, recompute=recompute)
    whole = np.array(run_whole(names))
    return _Layers(data, whole, samples, recompute=recompute).peaks(in_flight)


def resident_peak(
    data: ModelBytes,
    names: list[str],
    span: tuple[int, int],
    samples: int,
    in_flight: int,
    residence: str,
    *,
    recompute: bool = False,
) -> float:
    """`resident_peaks` of one run of layers."""
    i, j = span
    if residence == "host":
        whole = np.array(run_whole(names))
        return _Layers(data, whole, samples, recompute=recompute).peak(i, j, in_flight)
    first, last = np.int64(i), np.int64(j)
    state = float(data.optimizer[j] - data.optimizer[i])
    more = 0 if recompute else in_flight - 1
    acts = float(data.fixed(first, last)) + more * float(data.kept[j] - data.kept[i])
    acts += samples * float(data.per_sample(first, last, in_flight, recompute=recompute))
    return acts - state


class _Layers:
    """What each layer takes, for one size of micro-batch."""

    def __init__(self, data: ModelBytes, whole: np.ndarray, samples: int, *, recompute: bool) -> None:
        self._data, self._recompute = data, recompute
        held, made = np.diff(data.parameters), np.diff(data.gradients)
        steps = np.arange(data.num_layers)
        self._moves = np.where(whole, held, 0.0)
        self._stays = np.concatenate([[0.0], (held - self._moves).cumsum()])
        self._made = made
        self._saved = samples * np.diff(data.saved) + np.diff(data.kept)
        work = samples * data.transient[steps, steps + 1] + data.transient_fixed[steps, steps + 1]
        self._work = work
        entering = np.concatenate([[data.input], data.output[:-1]]) * samples
        self._entering = entering
        # What enters a layer may be part of what it saves itself: then recompute keeps it once.
        again = np.concatenate([[False], data.kept_behind[:-1]]) * entering
        self._own = np.maximum(self._saved - again, 0.0)
        self._samples = samples

    def peaks(self, in_flight: int) -> np.ndarray:
        """By (i, j) what layers i..j-1 hold at most."""
        count = self._data.num_layers
        table = np.zeros((count + 1, count + 1))
        for i in range(count):
            table[i, i + 1 :] = self._row(i, count, in_flight)
        return table

    def peak(self, i: int, j: int, in_flight: int) -> float:
        """The same of one run of layers."""
        return float(self._row(i, j, in_flight)[-1])

    def _row(self, i: int, j: int, in_flight: int) -> np.ndarray:
        """What runs from layer i on that end with layer i, i+1, …, j-1 hold at most."""
        kept = self._entering[i:j] if self._recompute else self._saved[i:j]
        own = self._own[i:j] if self._recompute else 0.0
        upto = kept.cumsum()
        moves, made = self._moves[i:j], self._made[i:j]
        before, behind = _nearest_before(moves), _nearest_before(moves[::-1])[::-1]
        leaving = _nearest_before(made[::-1])[::-1]
        at = upto + own + self._work[i:j] + moves
        held = before + (made if self._data.counted else 2 * made)
        last = at + held
        inside = at + np.maximum(held + leaving, behind)
        highest = np.maximum(last, np.append(0.0, np.maximum.accumulate(inside[:-1])))
        ends = np.arange(i + 1, j + 1)
        return highest + (in_flight - 1) * upto + self._ends(i, ends, in_flight) + self._always(i, ends)

    def _always(self, i: int, j: np.ndarray) -> np.ndarray:
        return self._data.buffers[j] - self._data.buffers[i] + self._stays[j] - self._stays[i]

    def _ends(self, i: int, j: np.ndarray, in_flight: int) -> np.ndarray:
        """What crosses the stage's ends, as for a stage that is on the device."""
        data, first = self._data, np.full(len(j), i)
        if not data.counted:
            entering = float(data.output[i - 1]) if i else 0.0
            return 2 * self._samples * (entering + data.output[j - 1])
        given_back = np.where(j < data.num_layers, data.output[j - 1], 0.0)
        ends = in_flight * data.at_ends(first, j, recompute=self._recompute)
        return self._samples * (ends + given_back)


def _nearest_before(values: np.ndarray) -> np.ndarray:
    """By place, the nearest value before it that is not 0. Example: 3, 0, 2: 0, 3, 3."""
    places = np.where(values > 0, np.arange(len(values)), -1)
    last = np.append(-1, np.maximum.accumulate(places)[:-1])
    return np.where(last >= 0, values[last], 0.0)


def home_bytes(data: ModelBytes, i: int, j: int, *, state_on_disk: bool = False) -> float:
    """What the host holds of layers i..j-1 with either residence: parameters, gradients, optimiser state.

    Of state on disk two layers' at most: what is stepped on, and what comes next. Example: 4 layers of 100
    bytes of parameters, of gradients and 200 of state: 1,600, with state on disk 1,200.
    """
    held = data.parameters + data.gradients
    layers = np.sort(np.diff(data.optimizer)[i:j])
    state = layers[-2:] if state_on_disk else layers
    return float(held[j] - held[i] + state.sum())
