"""Places that are none are refused by what is wrong with them, before anything is measured."""

from pathlib import Path
from typing import Any

import pytest

from evener.core.fleet import Device, Fleet
from evener.errors import FileError, UnknownNameError, UsageError
from evener.session.planning.place_words import check_place, make_folders

FLEET = Fleet(devices=(Device(name="lab/a", kind="k"), Device(name="lab/b", kind="k")))


@pytest.mark.parametrize(
    "wish",
    ["auto", "dense", {"lab/a": 5, "lab/b": 0}, {"lab/b": 0.5}, {"file": Path("x"), "rows": 1, "hot": 0}],
)
def test_what_is_a_place(wish: Any) -> None:
    check_place("emb", wish, FLEET)


@pytest.mark.parametrize(
    ("wish", "said", "remedy"),
    [
        ({"fiel": "/x", "rows": 10}, "no key of a tiered table: fiel", "one of file, rows, hot; or weights"),
        ({"fiel": "/x"}, "no key of a tiered table: fiel", "one of file, rows, hot; or weights"),
        ({"file": "/x", "lab/a": 1}, "no key of a tiered table: lab/a", "one of file, rows, hot"),
        ({"file": "/x"}, 'place of emb is a tiered table without "rows"', "FOLDER"),
        ({"rows": 10}, 'place of emb is a tiered table without "file"', "FOLDER"),
        ({"file": 3, "rows": 10}, '"file" is 3', "path of a folder"),
        ({"file": "/x", "rows": 0}, '"rows" is 0', "1 or more"),
        ({"file": "/x", "rows": "10"}, "\"rows\" is '10'", "1 or more"),
        ({"file": "/x", "rows": 1, "hot": -1}, '"hot" is -1', "0 or more"),
        ({"lab/a": "five"}, "lab/a: 'five'", "not all 0"),
        ({"lab/a": -1, "lab/b": 2}, "lab/a: -1", "not all 0"),
        ({"lab/a": float("nan")}, "lab/a: nan", "not all 0"),
        ({"lab/a": True}, "lab/a: True", "not all 0"),
        ({"lab/a": 0}, "all are 0", "not all 0"),
        ({}, "place of emb is {}", "weights by device"),
        ([5, 3], r"place of emb is \[5, 3\]", "weights by device"),
        (7, "place of emb is 7", "weights by device"),
        ("gpu", "place of emb is 'gpu'", '"auto", "cpu", "device", "dense", weights by device'),
    ],
)
def test_what_is_none(wish: Any, said: str, remedy: str) -> None:
    with pytest.raises(UsageError, match=said) as e:
        check_place("emb", wish, FLEET)
    assert remedy in e.value.remedy


def test_all_tables_are_named_as_the_recipe_does() -> None:
    with pytest.raises(UsageError, match=r"place of all tables \(\"\*\"\) is 'nonsense'"):
        check_place("*", "nonsense", FLEET)


def test_weights_of_a_device_that_is_not_there() -> None:
    with pytest.raises(UnknownNameError, match=r"weights of lab9/x, no device of the job") as e:
        check_place("emb", {"lab/a": 5, "lab9/x": 3}, FLEET)
    assert e.value.remedy == "weights of lab/a, lab/b"


def test_a_folder_that_cannot_be_made_is_told_with_its_table(tmp_path: Path) -> None:
    make_folders({"emb": {"file": str(tmp_path / "a/b"), "rows": 1}, "other": "cpu"})
    assert (tmp_path / "a/b").is_dir()
    (tmp_path / "taken").write_text("")
    with pytest.raises(FileError, match=r"folder of the table emb, .*taken/emb, cannot be made: Not a dir"):
        make_folders({"emb": {"file": tmp_path / "taken/emb", "rows": 1}})
