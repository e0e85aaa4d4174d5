"""What a recipe may say of a table's place, checked before anything is measured.

"cpu"                                     a word
{"lab1/a": 5, "lab1/b": 3}                weights by device
{"file": "/data/emb", "rows": 1_000_000}  a tiered table
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evener.core.fleet import Fleet
from evener.errors import FileError, UnknownNameError, UsageError
from evener.planner.tables import CPU, DENSE, DEVICE

AUTO = "auto"
PLACES = (AUTO, CPU, DEVICE, DENSE)
KEYS = ("file", "rows", "hot")  # of a tiered table
_ALL = "*"
_WORDS = ", ".join(f'"{p}"' for p in PLACES)
_TIERED = '{"file": FOLDER, "rows": N}: N rows in memory'


def check_place(table: str, wish: Any, fleet: Fleet) -> None:
    """UsageError for a place that is none, UnknownNameError for weights of a device that is not in `fleet`.

    `table` is what the recipe names, "*" for all tables.
    """
    whose = f'all tables ("{_ALL}")' if table == _ALL else table
    if isinstance(wish, str) and wish in PLACES:
        return
    if not isinstance(wish, Mapping) or not wish:
        raise UsageError(f"place of {whose} is {wish!r}", remedy=f"{_WORDS}, weights by device, or {_TIERED}")
    names = [d.name for d in fleet.devices]
    if any(key in KEYS for key in wish):
        _check_keys(whose, wish)
        _check_tiered(whose, wish)
        return
    strangers = [key for key in wish if key not in names]
    if strangers and not all(_is_weight(wish[key]) for key in strangers):
        _check_keys(whose, wish)
    if strangers:
        raise UnknownNameError(
            f"place of {whose} has weights of {', '.join(map(str, strangers))}, no device of the job",
            remedy=f"weights of {', '.join(names)}",
        )
    wrong = [f"{key}: {value!r}" for key, value in wish.items() if not _is_weight(value)]
    if wrong or not sum(wish.values()):
        raise UsageError(
            f"place of {whose} has weights that are no parts of a table: {', '.join(wrong) or 'all are 0'}",
            remedy='numbers of 0 or more, not all 0: {"lab1/a": 5, "lab1/b": 3}',
        )


def make_folders(places: Mapping[str, Any]) -> None:
    """Make the folders of tiered tables on this host; FileError for one that cannot be made."""
    for table, wish in places.items():
        if isinstance(wish, Mapping) and "file" in wish:
            try:
                Path(wish["file"]).mkdir(parents=True, exist_ok=True)
            except OSError as e:
                raise FileError(
                    f"the folder of the table {table}, {wish['file']}, cannot be made: {e.strerror}",
                    remedy="a folder on a disk that this user may write to",
                ) from e


def _check_keys(whose: str, wish: Mapping[Any, Any]) -> None:
    unknown = [str(key) for key in wish if key not in KEYS]
    if unknown:
        raise UsageError(
            f"place of {whose} has what is no key of a tiered table: {', '.join(unknown)}",
            remedy=f"one of {', '.join(KEYS)}; or weights by device",
        )


def _check_tiered(whose: str, wish: Mapping[str, Any]) -> None:
    for key in KEYS[:2]:
        if key not in wish:
            raise UsageError(f'place of {whose} is a tiered table without "{key}"', remedy=_TIERED)
    if not isinstance(wish["file"], str | Path) or not str(wish["file"]):
        raise UsageError(f'place of {whose}: "file" is {wish["file"]!r}', remedy="the path of a folder")
    for key, least in (("rows", 1), ("hot", 0)):
        value = wish.get(key, least)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise UsageError(
                f'place of {whose}: "{key}" is {value!r}', remedy=f"a whole number of rows, {least} or more"
            )


def _is_weight(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value >= 0
