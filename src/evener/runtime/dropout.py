"""Dropout whose masks do not depend on the split: each entry's fate follows from a key, not from a generator.

key       seed, step, layer's name, number of its call, sample's position in the global batch
word j    mixes the key of the sample with j, in 32-bit integer arithmetic that every device does alike
mask      two 16-bit lanes of each word: an entry is dropped when its lane is below p · 65536
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.module_tracker import ModuleTracker

from evener.core.words import counted
from evener.errors import ModelError

_CHANNELS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)  # drop whole channels
_REPLACED = (nn.Dropout, *_CHANNELS)
_LANES = 1 << 16


class KeyedDropout(nn.Dropout):
    """Dropout by keys. The first dimension holds the samples, or as many rows for each in turn.

    p is rounded to a multiple of 1 / 65536, and what is kept is scaled by what that leaves. A sample's mask
    is a function of its key and of the place within the sample: padding along the first dimension behind the
    samples leaves it as it is, along a later one it does not.
    """

    def __init__(self, p: float, name: str, seed: int, *, channels: bool = False) -> None:
        super().__init__(p)
        self.name, self.seed, self.channels = name, seed, channels
        self.keys: DropoutKeys | None = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """`input` with entries dropped; ModelError in training outside of `dropout_keys`."""
        if not self.training or self.p == 0.0:
            return input
        if self.keys is None:
            raise ModelError(
                f"{self.name} drops by keys and was given none",
                remedy="with dropout_keys(model, step, positions): around forward and around backward",
            )
        dropped = round(self.p * _LANES)
        if dropped == _LANES:
            return input * 0.0
        return input * self._mask(input, dropped) * (_LANES / (_LANES - dropped))

    def _mask(self, x: torch.Tensor, dropped: int) -> torch.Tensor:
        shape = list(x.shape)
        if self.channels:
            shape[2:] = [1] * len(shape[2:])
        words = self.keys.words(self, shape[0])  # type: ignore[union-attr]
        samples = len(words)
        if not samples or shape[0] % samples:
            raise ModelError(
                f"{self.name} has {counted(shape[0], 'row')} for {counted(samples, 'sample')}",
                numbers=f"input shape {tuple(x.shape)}, samples in its first dimension",
                remedy="a model that puts samples first (batch_first=True), or dropout='per-device'",
            )
        size = int(np.prod(shape)) // samples
        lanes = lanes_of(torch.from_numpy(words).to(x.device), size)
        return (lanes >= dropped - _LANES // 2).view(shape)


class DropoutKeys:
    """The keys of one micro-batch: a context, entered around forward and again around backward.

    The second entry gives what is run again (recomputed activations) the masks of the first. ModelError for
    a layer that is called several times in one forward and then recomputed, as its calls may come back in
    another order.
    """

    def __init__(self, layers: Sequence[KeyedDropout], step: int, positions: Iterable[int] | None) -> None:
        self._layers, self._step = layers, step
        self._positions = None if positions is None else np.fromiter(positions, dtype=np.uint64)
        self._calls: Counter[str] = Counter()
        self._entries = 0

    def __enter__(self) -> "DropoutKeys":
        self._entries += 1
        for layer in self._layers:
            layer.keys = self
        return self

    def __exit__(self, *error: Any) -> None:
        for layer in self._layers:
            layer.keys = None

    def calls(self, layer: KeyedDropout) -> int:
        """How often `layer` has run in the first entry."""
        return self._calls[layer.name]

    def words(self, layer: KeyedDropout, rows: int) -> np.ndarray:
        """Two 32-bit words for each sample, for the next call of `layer`."""
        if self._entries == 1:
            self._calls[layer.name] += 1
        if self._positions is None:
            return _words(layer, self._step, 0, np.arange(rows, dtype=np.uint64))
        if self._entries > 1 and self._calls[layer.name] > 1:
            raise ModelError(
                f"{layer.name} is recomputed, and ran {self._calls[layer.name]} times in this micro-batch",
                remedy="a dropout module of its own in each place, or no recomputation of that part",
            )
        return _words(layer, self._step, self._calls[layer.name], self._positions)


def replace_dropout(model: nn.Module, seed: int) -> list[str]:
    """Put a `KeyedDropout` in the place of every nn.Dropout and Dropout1d, 2d, 3d; the names they have.

    Dropout that a model calls as a function (inside of attention, between the layers of an LSTM) is out of
    reach: `unkeyed_randomness` names it. Example: Sequential(Linear(4, 4), Dropout(0.1)) gives ["1"].
    """
    made: dict[int, KeyedDropout] = {}
    for path, parent in list(model.named_modules()):
        for key, child in parent._modules.items():
            if type(child) in _REPLACED:
                name = f"{path}.{key}" if path else key
                channels = isinstance(child, _CHANNELS)
                new = KeyedDropout(child.p, name, seed, channels=channels)
                made.setdefault(id(child), new.train(child.training))
            if id(child) in made:
                parent._modules[key] = made[id(child)]
    return [layer.name for layer in made.values()]


def keyed_layers(module: nn.Module) -> list[KeyedDropout]:
    """The layers of `module` that take keys."""
    return [m for m in module.modules() if isinstance(m, KeyedDropout)]


def dropout_keys(
    layers: nn.Module | Sequence[KeyedDropout], step: int, positions: Iterable[int] | None
) -> DropoutKeys:
    """The keys of one micro-batch of `step`: its samples are at `positions` of the global batch, in order.

    None for `positions` takes rows for samples and gives every call the same masks: for tracing and timing.
    A plain loop gives the positions of its own batch and gets the masks of every split. Example:

        keys = dropout_keys(model, step, range(16))
        with keys: loss = criterion(model(x), y)
        with keys: loss.backward()
    """
    return DropoutKeys(keyed_layers(layers) if isinstance(layers, nn.Module) else layers, step, positions)


def lanes_of(words: torch.Tensor, size: int) -> torch.Tensor:
    """`size` random 16-bit whole numbers, -32768 to 32767, for each row of `words` (rows, 2) int32.

    Word j of a row is mix(j) ^ first word, multiplied and shifted twice, the second time by the other word:
    the multiply-xorshift mixing of MurmurHash3's finaliser with a key in each half. Products keep their low
    32 bits, which is what every device does with int32.
    """
    count = (size + 1) // 2
    column = torch.arange(count, dtype=torch.int32, device=words.device)
    column = _mixed(_mixed(column, 16, -2048144789), 13, -1028477387)  # 0x85EBCA6B and 0xC2B2AE35
    mixed = column ^ words[:, :1]
    mixed = _mixed(mixed, 15, 0x21F0AAAD)
    mixed = _mixed(mixed, 15, words[:, 1:] | 1)
    mixed ^= _shifted(mixed, 16)
    return mixed.view(torch.int16)[:, :size]


def _mixed(x: torch.Tensor, bits: int, factor: Any) -> torch.Tensor:
    x ^= _shifted(x, bits)
    x *= factor
    return x


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """The bits moved right, zeros from the left: int32's own shift would repeat the sign."""
    moved = x >> bits
    moved &= (1 << (32 - bits)) - 1
    return moved


def _words(layer: KeyedDropout, step: int, call: int, positions: np.ndarray) -> np.ndarray:
    """SplitMix64 (Steele, Lea, Flood 2014) of a hash of the key, at each position: two int32 a sample."""
    text = f"{layer.seed}/{step}/{layer.name}/{call}"
    start = np.uint64(int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little"))
    z = start + (positions + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return z.astype("<u8").view("<i4").reshape(-1, 2)


def unkeyed_randomness(model: nn.Module, run: Callable[[], Any]) -> list[str]:
    """What still draws from a generator while `run()` calls `model`, as sentences for a plan's `inexact`.

    Names keyed layers too that one forward calls several times: the calls are numbered as one device meets
    them, so that they depend on the split unless they all lie in one stage. Example: an LSTM with dropout=0.1
    gives ["dropout: lstm draws aten.bernoulli_, which no key reaches"].
    """
    layers = keyed_layers(model)
    keys = dropout_keys(layers, -1, None)
    draws = _Draws(model)
    with keys, draws.tracker, draws:
        run()
    found = [f"dropout: {where} draws {what}, which no key reaches" for where, what in draws.found]
    return found + [
        f"dropout: {layer.name} is called {keys.calls(layer)} times in one forward, whose masks are those of "
        "every split only where all calls lie in one stage"
        for layer in layers
        if keys.calls(layer) > 1
    ]


class _Draws(TorchDispatchMode):
    """Collects (module, operation) of every operation that draws random numbers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.tracker = ModuleTracker()
        self.found: dict[tuple[str, str], None] = {}
        self._root = type(model).__name__

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and _chance(func, args, kwargs or {}):
            where = max(self.tracker.parents, key=len).removeprefix("Global")
            where = where.removeprefix(self._root).removeprefix(".")
            self.found[where or "the model itself", str(func.overloadpacket)] = None
        return func(*args, **(kwargs or {}))


def _chance(func: Any, args: tuple, kwargs: dict) -> bool:
    """False for an operation that could drop and was told to drop nothing."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.name in ("dropout_p", "dropout", "p"):
            value = kwargs.get(argument.name, args[place] if place < len(args) else argument.default_value)
            return value is None or value > 0
    return True
