"""What two processes must have in common to train one model: compared before a device may join."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from evener import __version__
from evener.core.figures import Value
from evener.runtime.checkpoints.manifest import model_id
from evener.runtime.raw import raw
from evener.session.checkpoints.state import infos_of
from evener.session.recipe import Recipe
from evener.session.request import Request


class Identity(Value, frozen=True, kw_only=True):
    """Versions, script, model and data as this process has them; hashes are hexadecimal."""

    evener: str
    torch: str
    script: str
    model: str
    samples: int
    data: str

    def differs(self, other: "Identity") -> str:
        """What is not the same in `other`, in words; empty where all is."""
        words = {
            "evener": "another version of evener",
            "torch": "another version of torch",
            "script": "another script",
            "model": "another model (names, shapes or dtypes)",
            "samples": "another number of samples",
            "data": "other data",
        }
        found = []
        for name, told in words.items():
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                found.append(f"{told}: {str(theirs)[:16]} here {str(mine)[:16]}")
        return "; ".join(found)


def identity_of(request: Request, recipe: Recipe) -> Identity:
    """Who this process is, with the first, the middle and the last sample standing for all of its data."""
    size = len(recipe.dataset)
    data = hashlib.sha256()
    for at in sorted({0, size // 2, size - 1}):
        _take_in(recipe.dataset[at], data)
    script = Path(request.script).read_bytes() if request.script else b""
    return Identity(
        evener=__version__,
        torch=torch.__version__.partition("+")[0],  # builds for different hardware may train together
        script=hashlib.sha256(script).hexdigest(),
        model=model_id(infos_of(recipe.model)),
        samples=size,
        data=data.hexdigest(),
    )


def _take_in(value: Any, into: Any) -> None:
    """Tensors, numbers and texts of a sample, however they are nested; other objects by their type alone."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().contiguous()
        into.update(f"{value.dtype}{tuple(value.shape)}".encode())
        into.update(raw(value).numpy().tobytes())
    elif isinstance(value, Mapping):
        for key in sorted(map(str, value)):
            into.update(key.encode())
        for item in value.values():
            _take_in(item, into)
    elif isinstance(value, list | tuple):
        for item in value:
            _take_in(item, into)
    elif isinstance(value, bool | int | float | str | bytes):
        into.update(repr(value).encode())
    else:
        into.update(type(value).__qualname__.encode())
