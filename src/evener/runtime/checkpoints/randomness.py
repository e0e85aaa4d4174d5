"""Every generator that a device's process draws from, as tensors."""

import random
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor


def rng_state(device: torch.device) -> dict[str, Tensor]:
    """The states of torch's generators of the host and of `device`, of Python's and of numpy's global one."""
    state = {"torch": torch.get_rng_state(), "python": _of_python(), "numpy": _of_numpy()}
    if device.type not in ("cpu", "meta"):
        state["accelerator"] = torch.get_device_module(device).get_rng_state(device)
    return state


def set_rng_state(state: Mapping[str, Tensor], device: torch.device) -> None:
    """Put all where `rng_state` found them; an accelerator's only on one that has as large a state."""
    torch.set_rng_state(state["torch"])
    numbers = state["python"].tolist()
    gauss = None if numbers[1] < 0 else float(np.int64(numbers[2]).view(np.float64))
    random.setstate((numbers[0], tuple(numbers[3:]), gauss))
    words = state["numpy"].numpy()
    gauss_of_numpy = float(words[2:3].view(np.float64)[0])
    np.random.set_state(
        ("MT19937", words[3:].astype(np.uint32), int(words[0]), int(words[1]), gauss_of_numpy)
    )
    if "accelerator" in state and device.type not in ("cpu", "meta"):
        module = torch.get_device_module(device)
        if state["accelerator"].shape == module.get_rng_state(device).shape:
            module.set_rng_state(state["accelerator"], device)


def _of_python() -> Tensor:
    """[version, whether a Gaussian is kept, its bits, words …]: whole numbers of 64 bits."""
    version, words, gauss = random.getstate()
    bits = np.float64(gauss or 0.0).view(np.int64)
    return torch.tensor([version, -1 if gauss is None else 1, int(bits), *words], dtype=torch.int64)


def _of_numpy() -> Tensor:
    """[place, whether a Gaussian is kept, its bits, words …]."""
    _, words, place, has_gauss, gauss = np.random.get_state()
    assert isinstance(words, np.ndarray)
    bits = np.float64(gauss).view(np.int64)
    return torch.tensor([int(place), int(has_gauss), int(bits), *words.tolist()], dtype=torch.int64)
