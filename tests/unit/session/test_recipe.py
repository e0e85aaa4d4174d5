"""What a recipe refuses before anything runs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from evener.errors import ModelError, UsageError
from evener.session.recipe import Recipe, load_recipe


def made(**options: Any) -> Recipe:
    model = nn.Linear(1, 1)
    return Recipe(
        model=model, dataset=[0], loss=nn.MSELoss(), optimizer=torch.optim.SGD, global_batch=1, **options
    )


@pytest.mark.parametrize(
    ("option", "wrong", "right"),
    [
        ("reduction", "avg", ("mean", "sum", None)),
        ("precision", "fp16", ("float32", "bfloat16", "float16")),
        ("precision", None, ("float32", "bfloat16", "float16")),
        ("on_non_finite", "raise", ("stop", "skip")),
        ("batch_norm", "sync", ("local", "wave")),
        ("dropout", "off", ("per-device", "split-free")),
    ],
)
def test_a_choice_that_does_not_exist_is_refused_with_those_that_do(
    option: str, wrong: Any, right: tuple[Any, ...]
) -> None:
    for choice in right:
        assert getattr(made(**{option: choice}), option) == choice
    with pytest.raises(UsageError, match=f"{option}={wrong!r}") as refused:
        made(**{option: wrong})
    assert refused.value.remedy == "one of " + ", ".join(c for c in right if c)


@pytest.mark.parametrize("place", [["emb"], 3])
def test_places_are_by_table_or_a_word_for_all(place: Any) -> None:
    with pytest.raises(UsageError, match=f"place is a {type(place).__name__}"):
        made(place=place)


def test_a_table_that_no_memory_holds_is_to_be_built_on_the_meta_device(tmp_path: Path) -> None:
    script = tmp_path / "huge.py"
    script.write_text(
        "from torch import nn\n\ndef recipe():\n    nn.Embedding(10**12, 16)\n", encoding="utf-8"
    )
    with pytest.raises(ModelError, match=r"huge\.py:4 raised RuntimeError") as refused:
        load_recipe(str(script), 0)
    assert 'device="meta", see "A table larger than any memory"' in refused.value.remedy
