"""Of what type each part of a recipe is: checked when it is made, so that no traceback has to tell."""

from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any

import torch

from evener.core.job import MAX_SAMPLES
from evener.errors import DataError, UsageError

_FUNCTIONS = {
    "loss": "loss=torch.nn.CrossEntropyLoss(), or a function of (output, target)",
    "optimizer": "optimizer=lambda params: torch.optim.SGD(params, lr=0.1)",
    "inputs": "inputs=lambda batch: ((batch[0],), {}, batch[1])",
    "weight": "weight=lambda batch: a number",
    "schedule": "schedule=lambda samples_seen: a factor on the learning rate",
    "collate": "collate=lambda samples: a batch",
}
_REQUIRED = ("loss", "optimizer")
_INTEGERS = {"global_batch": (1, MAX_SAMPLES), "workers": (0, 1024)}
_SWITCHES = ("shuffle", "steal")
_WORDS = ("compress", "fewer", "metrics")
_MAPPINGS = ("figures", "ids")
_MOST_OF_A_NAME = 200


def checked_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """What of a recipe's fields is to be replaced: whole numbers as int, lists of words as tuples.

    UsageError for a field of the wrong type, DataError for a dataset that is none or is empty.
    Example: {"global_batch": np.int64(8), …} gives {"global_batch": 8, …}; 8.5 is refused.
    """
    _dataset("dataset", given["dataset"])
    if given["heldout"] is not None:
        _dataset("heldout", given["heldout"])
    for name, right in _FUNCTIONS.items():
        if given[name] is not None or name in _REQUIRED:
            _function(name, given[name], right)
    for name in _SWITCHES:
        _need(isinstance(given[name], bool), name, given[name], f"{name}=True or {name}=False")
    for name in _MAPPINGS:
        _need(isinstance(given[name], Mapping), name, given[name], f'{name}={{"a name": …}}')
    for name, value in given["figures"].items():
        _need(_is_number(value), f"figures[{name!r}]", value, "a number")
    norm = given["max_norm"]
    _need(norm is None or (_is_number(norm) and norm > 0), "max_norm", norm, "a number above 0, or None")
    title = given["name"]
    told = f"a line of at most {_MOST_OF_A_NAME} characters"
    good = isinstance(title, str) and len(title) <= _MOST_OF_A_NAME and (title.isprintable() or not title)
    _need(good, "name", title, told)
    integers = {name: _integer(name, given[name], *limits) for name, limits in _INTEGERS.items()}
    return integers | {name: _words(name, given[name]) for name in _WORDS}


def _need(holds: bool, name: str, value: Any, right: str) -> None:
    if not holds:
        shown = repr(value)
        shown = f": {shown}" if len(shown) <= 60 and isinstance(value, str | Real | list | tuple) else ""
        raise UsageError(f"{name} of the recipe is of type {type(value).__name__}{shown}", remedy=right)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and abs(float(value)) < float("inf")


def _function(name: str, value: Any, right: str) -> None:
    if isinstance(value, type) and issubclass(value, torch.nn.Module):
        raise UsageError(
            f"{name} of the recipe is the class {value.__name__}, not one of its instances",
            remedy=f"{name}={value.__name__}()",
        )
    _need(isinstance(value, Callable), name, value, right)  # type: ignore[arg-type]


def _integer(name: str, value: Any, least: int, most: int) -> int:
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise UsageError(
            f"{name} of the recipe is of type {type(value).__name__}: {value!r:.60}", remedy="a whole number"
        )
    number = int(value)
    if not least <= number <= most:
        raise UsageError(
            f"{name} must be {least} or more, and at most {most}, got {number:.6g}",
            remedy="a number between the two",
        )
    return number


def _words(name: str, value: Any) -> tuple[str, ...]:
    good = isinstance(value, list | tuple) and all(isinstance(word, str) for word in value)
    _need(good, name, value, f'{name}=("a word", …): a tuple of words, ("{value}",) for one')
    return tuple(value)


def _dataset(name: str, value: Any) -> None:
    whose = "the dataset" if name == "dataset" else "the held-out set"
    if not hasattr(value, "__getitem__") or not hasattr(value, "__len__"):
        raise DataError(
            f"{whose} is of type {type(value).__name__}, without length or index",
            remedy="a map-style dataset: __len__ and __getitem__; a list of samples will do",
        )
    if len(value) == 0:
        remedy = "check the path and filters" + ("" if name == "dataset" else "; heldout=None for none")
        raise DataError(f"{whose} is empty", numbers="0 samples", remedy=remedy)
