"""What a recipe refuses before anything runs."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import evener as ev
from evener.errors import DataError, ModelError, UsageError
from evener.session.recipe import Recipe, load_recipe


def made(**options: Any) -> Recipe:
    model = nn.Linear(1, 1)
    needed = {"dataset": [0], "loss": nn.MSELoss(), "optimizer": torch.optim.SGD, "global_batch": 1}
    return Recipe(model=model, **(needed | options))


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


def test_no_places_may_be_said_as_none() -> None:
    assert made(place=None).places == {}


def test_a_table_that_no_memory_holds_is_to_be_built_on_the_meta_device(tmp_path: Path) -> None:
    script = tmp_path / "huge.py"
    script.write_text(
        "from torch import nn\n\ndef recipe():\n    nn.Embedding(10**12, 16)\n", encoding="utf-8"
    )
    with pytest.raises(ModelError, match=r"huge\.py:4 raised RuntimeError") as refused:
        load_recipe(str(script), 0)
    assert 'device="meta", see "A table larger than any memory"' in refused.value.remedy


SGD = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("option", "wrong", "told"),
    [
        ("optimizer", SGD, "optimizer=lambda params: "),
        ("optimizer", None, "optimizer=lambda params: "),
        ("loss", 3, "CrossEntropyLoss()"),
        ("loss", nn.MSELoss, "loss=MSELoss()"),
        ("collate", [1], "collate=lambda samples"),
        ("schedule", torch.optim.lr_scheduler.StepLR(SGD, 1), "schedule=lambda samples_seen"),
        ("inputs", "x", "inputs=lambda batch"),
        ("weight", 2, "weight=lambda batch"),
        ("metrics", "correct", '("correct",) for one'),
        ("compress", "int8", '("int8",) for one'),
        ("shuffle", "no", "shuffle=True or"),
        ("max_norm", "1", "above 0"),
        ("max_norm", 0, "above 0"),
        ("figures", {"loss": "low"}, "a number"),
        ("name", 3, "a line"),
        ("name", "two\nlines", "a line"),
        ("global_batch", 8.5, "a whole number"),
        ("global_batch", True, "a whole number"),
        ("global_batch", 0, ""),
        ("global_batch", 10**20, ""),
        ("workers", 1.0, "a whole number"),
        ("workers", -1, ""),
    ],
)
def test_a_field_of_another_type_is_refused_when_the_recipe_is_made(
    option: str, wrong: Any, told: str
) -> None:
    with pytest.raises(UsageError, match=option) as refused:
        made(**{option: wrong})
    assert refused.value.code == "EV103"
    assert told in refused.value.remedy


@pytest.mark.parametrize(
    ("option", "wrong", "told"),
    [
        ("dataset", iter([1]), "without length"),
        ("dataset", [], "the dataset is empty"),
        ("heldout", [], "the held-out set is empty"),
        ("heldout", 3, "held-out set is of type int"),
    ],
)
def test_data_that_cannot_be_used_is_refused_when_the_recipe_is_made(
    option: str, wrong: Any, told: str
) -> None:
    with pytest.raises(DataError, match=told):
        made(**{option: wrong})


def test_numbers_of_other_libraries_and_lists_of_words_are_taken() -> None:
    recipe = made(global_batch=torch.tensor([4]).numpy()[0], metrics=["correct"])
    assert (recipe.global_batch, type(recipe.global_batch), recipe.metrics) == (4, int, ("correct",))


@pytest.mark.parametrize("name", ["job", "README.md"])
def test_a_script_may_have_any_name(tmp_path: Path, name: str) -> None:
    script = tmp_path / name
    script.write_text("def recipe():\n    return 3\n", encoding="utf-8")
    with pytest.raises(UsageError, match="returned a int"):
        load_recipe(script, 0)
    script.write_text("# A title\n\nSome *text*.\n", encoding="utf-8")
    with pytest.raises(ModelError, match=f"{name}:3 is no Python: SyntaxError"):
        load_recipe(script, 0)


def test_what_a_script_says_when_it_fails_is_no_command_for_a_terminal(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text("raise ValueError('a\\x1b[31mb')", encoding="utf-8")
    with pytest.raises(ModelError, match=r"raised ValueError: a\ufffd.31mb"):
        load_recipe(script, 0)


@pytest.mark.parametrize(
    ("schedule", "told"),
    [
        (lambda opt: torch.optim.lr_scheduler.StepLR(opt, 10), "StepLR|int"),
        (lambda seen: 1 / seen, "ZeroDivisionError"),
        (lambda seen: float("nan"), "factor of nan"),
        (lambda seen: None, "TypeError"),
    ],
)
def test_a_schedule_that_gives_no_factor_is_refused_when_the_recipe_is_made(schedule: Any, told: str) -> None:
    """It was found out after measuring, as an error of evener's own."""
    with pytest.raises(ModelError, match="schedule failed at 0 samples") as refused:
        made(schedule=schedule)
    assert re.search(told, str(refused.value))


def test_an_optimiser_that_cannot_be_made_is_the_recipes_error() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(2))]
    with pytest.raises(ModelError, match=r"optimizer failed: ValueError.*\(test_recipe.py:\d+\)"):
        made(optimizer=lambda params: torch.optim.SGD(params, lr=-1.0)).make_optimizer(parameters)
    with pytest.raises(ModelError, match="gave a list, which is no optimiser"):
        made(optimizer=list).make_optimizer(parameters)
    with pytest.raises(ModelError, match="LBFGS wants a closure"):
        made(optimizer=torch.optim.LBFGS).make_optimizer(parameters)
    assert isinstance(made(optimizer=torch.optim.AdamW).make_optimizer(parameters), torch.optim.AdamW)
    compiled: Any = SimpleNamespace(param_groups=[], step=max)  # has no signature, as much that is compiled
    assert made(optimizer=lambda params: compiled).make_optimizer(parameters) is compiled


@pytest.mark.parametrize("door", [ev.train, ev.predict])
def test_what_is_no_recipe_is_refused_at_the_front_door(door: Any) -> None:
    with pytest.raises(UsageError, match="a str was given for a recipe"):
        door("examples/text.py")


@pytest.mark.parametrize(("place", "where"), [({}, "meta"), ({"(loss)": "cpu"}, "cpu")])
def test_what_a_loss_module_holds_goes_where_the_loss_is_computed(place: Any, where: str) -> None:
    """Class weights stayed in host memory, and every recipe had to move them by hand."""
    made_ = made(loss=nn.CrossEntropyLoss(weight=torch.ones(2)), place=place)
    made_.loss_to(torch.device("meta"))
    assert made_.loss.weight.device.type == where
