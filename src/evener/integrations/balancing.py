"""`auto_balance`: how many layers of a Sequential each device should take, from what the layers measure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from evener.errors import UsageError
from evener.integrations.pipe import Devices, check_layers, device_of
from evener.planner.chain import cut_chain
from evener.profiling.layers import REPEATS, LayerTimer
from evener.profiling.timing import Stopwatch, figure_of
from evener.runtime.hardware import HardwareDriver

COPIES = 4
"""Bytes held for each byte of parameters: itself, its gradient and the two moments of Adam."""


def auto_balance(
    module: nn.Sequential,
    sample: Any,
    devices: int | Devices,
    *,
    mode: Literal["time", "memory"] = "time",
) -> list[int]:
    """The number of layers of each stage of a `Pipe` such that its busiest device has least to do.

    `devices` are those of the Pipe, or how many equal ones. "time": seconds of forward and backward of each
    layer on each device, with `sample` as input (give a micro-batch). "memory": bytes held in training, 4
    times the parameters plus what `sample` leaves for backward (give a whole batch), as a part of the memory
    of each device where all tell theirs. A device that comes k times counts as k times as slow, or as small.
    The cut is exact for what was measured (see `evener.planner.chain`). `module` and the random states are
    left as they are.

    UsageError for devices or modes there are not, NoPlanFitsError for more devices than layers.
    Example: eight equal layers on two devices, the second three times as slow: [6, 2].
    """
    check_layers(module)
    if mode not in ("time", "memory"):
        raise UsageError(f"mode={mode!r}", remedy="'time' or 'memory'")
    if isinstance(devices, int):
        first = next((t.device for t in tree_leaves(sample) if isinstance(t, torch.Tensor)), "cpu")
        places = [device_of(first)] * devices
        times = Counter({places[0]: 1}) if places else Counter()
    else:
        places = [device_of(d) for d in devices]
        times = Counter(places)
    if not places:
        raise UsageError("a balance needs a device", numbers=f"devices={devices!r}")
    costs = {device: measured(module, sample, device, mode) for device in times}
    sizes = {device: _memory_bytes(device) if mode == "memory" else 0 for device in times}
    weights = {d: times[d] / (sizes[d] if all(sizes.values()) else 1) for d in times}
    return list(cut_chain(weighted(places, costs, weights)))


def weighted(
    places: Sequence[Any], costs: Mapping[Any, Sequence[float]], weights: Mapping[Any, float]
) -> list[list[float]]:
    """The cost of each layer in each stage. Example: weighted("ab", {"a": [1], "b": [2]}, {"a": 3, "b": 1})
    is [[3], [2]].
    """
    return [[weights[place] * cost for cost in costs[place]] for place in places]


def measured(module: nn.Sequential, sample: Any, device: torch.device, mode: str) -> list[float]:
    """Seconds or bytes of each layer on `device`: copies run there, one layer at a time."""
    kind = {} if device.type == "cpu" else {"device_type": device.type}
    indices = [] if device.type == "cpu" else [device.index]
    found = []
    with torch.random.fork_rng(devices=indices, **kind), torch.enable_grad():
        value = tree_map_only(torch.Tensor, lambda t: t.detach().to(device), sample)
        for name, layer in module.named_children():
            copy = deepcopy(layer).to(device)
            found.append(_seconds(name, copy, value) if mode == "time" else _bytes(copy, value))
            value = tree_map_only(torch.Tensor, _cut_off, copy(_copied(value)))
    return found


def _cut_off(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _copied(value: Any) -> Any:
    """A copy that layers which work in place may write to."""
    return tree_map_only(torch.Tensor, torch.clone, value)


def _seconds(name: str, layer: nn.Module, value: Any) -> float:
    device = next(t.device for t in tree_leaves(value) if isinstance(t, torch.Tensor))
    timer = LayerTimer(layer, [((value,), {})], Stopwatch(HardwareDriver(device), 0.0), ("layer", name))
    for number in range(REPEATS + 2):
        timer.once(keep=number > 1)
    figures = (figure_of(timer.forward_s), figure_of(timer.backward_s))
    return sum(f.value for f in figures if f is not None)


def _bytes(layer: nn.Module, value: Any) -> float:
    held = sum(p.nbytes * (COPIES if p.requires_grad else 1) for p in layer.parameters())
    held += sum(b.nbytes for b in layer.buffers())
    params = _storages(list(layer.parameters()))
    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.update((k, v) for k, v in _storages(tensor).items() if k not in params)
        return tensor

    entering = _copied(value)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept):
        output = layer(entering)
    # What goes from one layer to the next is held by both: it counts where it comes out.
    kept = saved | _storages(output)
    return float(held + sum(kept[place] for place in kept.keys() - _storages(entering).keys()))


def _memory_bytes(device: torch.device) -> int:
    """All memory of an accelerator; 0 for the host's, which other processes share."""
    return 0 if device.type == "cpu" else torch.accelerator.get_memory_info(device)[1]


def _storages(value: Any) -> dict[int, int]:
    """Address → bytes of what the tensors in `value` lie in."""
    storages = [t.untyped_storage() for t in tree_leaves(value) if isinstance(t, torch.Tensor)]
    return {s.data_ptr(): s.nbytes() for s in storages}
