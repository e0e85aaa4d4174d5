"""The text example: its data, its reference numbers, its model."""

import math
import sys

import numpy as np
import pytest
import torch

from evener.session.recipe import load_recipe
from tests.architecture.source import ROOT


@pytest.fixture(scope="module")
def text():
    """The example's module."""
    made = load_recipe(ROOT / "examples" / "text.py", seed=0)
    return sys.modules[type(made.model).__module__]


def test_entropies_of_texts_that_can_be_worked_out(text) -> None:
    fair = np.frombuffer(b"ab" * 500 + b"a", dtype=np.uint8)
    figures = text.entropies(fair)
    assert figures["unigram_nats_per_byte"] == pytest.approx(math.log(2))
    assert figures["bigram_nats_per_byte"] == pytest.approx(0, abs=1e-12)
    noise = np.random.default_rng(0).integers(0, 4, 200_000).astype(np.uint8)
    assert text.entropies(noise)["bigram_nats_per_byte"] == pytest.approx(math.log(4), abs=1e-3)


def test_python_has_text_enough_and_the_figures_are_those_of_such_text(text) -> None:
    train, heldout = text.read_text()
    assert len(train) > 4_000_000 and 0.05 < len(heldout) / len(train) < 0.25
    figures = text.entropies(heldout)
    assert 3.0 < figures["unigram_nats_per_byte"] < 3.5
    assert 2.2 < figures["bigram_nats_per_byte"] < 2.7


def test_windows_are_the_text_in_order_and_the_bytes_that_follow(text) -> None:
    whole = np.arange(200, dtype=np.uint8)
    windows = text.Windows(whole)
    assert len(windows) == 3  # 199 bytes have a byte that follows: three windows of 64
    given, wanted = windows[2]
    assert given.tolist() == list(range(128, 192))
    assert wanted.tolist() == list(range(129, 193))
    spread = text.Windows(np.arange(250, dtype=np.uint8), num=2)
    assert [spread[i][0][0].item() for i in range(2)] == [0, 185]
    assert spread[1][1][-1].item() == 249


def test_the_model_sees_no_byte_that_it_is_to_predict(text) -> None:
    torch.manual_seed(0)
    model = text.ByteTransformer()
    torch.nn.init.normal_(model.head.weight)
    for block in model.blocks:
        torch.nn.init.normal_(block.out.weight, std=0.1)
    given = torch.randint(0, 256, (1, text.CONTEXT))
    other = given.clone()
    other[0, 40:] = (other[0, 40:] + 1) % 256
    with torch.no_grad():
        a, b = model(given), model(other)
    torch.testing.assert_close(a[:, :40], b[:, :40])
    assert not torch.allclose(a[:, 40:], b[:, 40:])


def test_training_starts_near_the_entropy_of_a_blind_guess(text) -> None:
    made = text.recipe()
    given, wanted = made.batch_of(4)
    assert made.loss(made.model(given), wanted).item() == pytest.approx(math.log(256), abs=0.3)


def test_the_learning_rate_is_a_function_of_samples_and_never_nothing(text) -> None:
    total = text.STEPS * text.GLOBAL_BATCH
    factors = [text.learning_rate_factor(s) for s in range(0, 2 * total, 997)]
    assert min(factors) >= 0.05 and max(factors) <= 1.0
    assert factors[0] < 0.1 and factors[-1] == 0.05
