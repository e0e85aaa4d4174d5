"""Whose state it can be, by the names of what it keeps."""

import pytest
import torch

from evener.errors import UsageError
from evener.session.checkpoints.optimizer_class import check_class

ADAM = {"exp_avg", "exp_avg_sq", "step"}


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("AdamW", ADAM),
        ("Adam", ADAM | {"max_exp_avg_sq"}),
        ("SGD", {"momentum_buffer"}),
        ("RMSprop", {"square_avg", "step", "grad_avg", "momentum_buffer"}),
        ("Adafactor", {"step", "row_var", "col_var", "variance"}),
        ("Muon", {"momentum_buffer"}),
    ],
)
def test_what_a_class_keeps_may_be_its_own(name: str, kept: set[str]) -> None:
    assert check_class(name, kept) == ""


@pytest.mark.parametrize(
    ("name", "kept", "words"),
    [
        ("SGD", ADAM, r"not that of SGD\n.*SGD keeps nothing\n.*one of Adam, AdamW, RAdam"),
        ("AdamW", {"momentum_buffer"}, r"AdamW keeps exp_avg, .*\n.*one of Muon, SGD"),
        ("AdamW", {"a", "b"}, r"it has a, b; .*\n.*the class that wrote it"),
        ("adamw", ADAM, r"AdamW is\n.*--optimizer AdamW"),
    ],
)
def test_another_class_is_refused_with_those_that_fit(name: str, kept: set[str], words: str) -> None:
    """It was found when the run was taken up, after everything had been copied."""
    with pytest.raises(UsageError, match=words):
        check_class(name, kept)


@pytest.mark.parametrize("name", ["Own", "LBFGS", "SparseAdam"])
def test_of_a_class_that_cannot_be_asked_it_is_said(name: str) -> None:
    assert check_class(name, {"x"}).startswith(f"whether {name} keeps x is not known here")


def test_nothing_of_torch_is_changed_by_asking() -> None:
    before = torch.get_rng_state()
    check_class("AdamW", ADAM)
    assert torch.equal(torch.get_rng_state(), before)
