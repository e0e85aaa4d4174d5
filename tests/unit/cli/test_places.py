"""Places of tables as the command line says them."""

import pytest

from evener.cli.options import places_in
from evener.errors import UsageError


def test_a_word_alone_is_for_all_tables() -> None:
    assert places_in(["auto", "emb=cpu"]) == {"*": "auto", "emb": "cpu"}
    assert places_in(["towers.movie=device"]) == {"towers.movie": "device"}


@pytest.mark.parametrize("word", ["gpu", "emb=", "emb=gpu", "=cpu", ""])
def test_what_is_no_place(word: str) -> None:
    with pytest.raises(UsageError, match="cannot read the place") as e:
        places_in([word])
    assert "cpu, device, dense, auto; files and weights by device are said in the recipe" in e.value.remedy


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["emb=cpu", "emb=device"], "the table emb: cpu and device"),
        (["cpu", "*=auto"], "all tables: cpu"),
    ],
)
def test_a_table_has_one_place(words: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=f"--place says two places of {said}"):
        places_in(words)
