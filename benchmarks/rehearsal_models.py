"""Small models of three families for the rehearsal device's benchmarks, by name."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import nn

import evener as ev

VOCABULARY, CONTEXT = 600, 32


class Block(nn.Module):
    """A layer of a transformer, causal."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, w = x.shape
        q, k, v = (
            t.view(b, s, self.heads, w // self.heads).transpose(1, 2)
            for t in self.into(self.norm1(x)).chunk(3, -1)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, s, w))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Language(nn.Module):
    """Embedding, blocks, norm and output layer of a language model."""

    def __init__(self, layers: int = 4, width: int = 64, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_word(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross-entropy over the vocabulary."""
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def words(context: int, vocabulary: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """512 samples of random words and the words behind them."""
    text = torch.randint(0, vocabulary, (512, context + 1), generator=torch.Generator().manual_seed(0))
    return [(row[:-1], row[1:]) for row in text]


def transformer(layers: int, width: int, vocabulary: int, context: int, global_batch: int) -> ev.Recipe:
    """A language model and AdamW over random words."""
    torch.manual_seed(0)
    return ev.Recipe(
        name="transformer",
        model=Language(layers, width, vocabulary),
        dataset=words(context, vocabulary),
        loss=next_word,
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3),
        global_batch=global_batch,
    )


def _language() -> tuple[nn.Module, Any, Callable]:
    return Language(), words(CONTEXT, VOCABULARY), next_word


def _images() -> tuple[nn.Module, Any, Callable]:
    def stage(wide: int, wider: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(wide, wider, 3, padding=1), nn.BatchNorm2d(wider), nn.ReLU())

    model = nn.Sequential(
        stage(3, 16), stage(16, 32), nn.MaxPool2d(2), stage(32, 64), nn.AdaptiveAvgPool2d(4), nn.Flatten(),
        nn.Linear(1024, 10),
    )  # fmt: skip
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(256, 3, 24, 24, generator=g), torch.randint(0, 10, (256,), generator=g)
    return model, list(zip(x, y, strict=True)), nn.functional.cross_entropy


def _tables() -> tuple[nn.Module, Any, Callable]:
    sizes = (100, 400, 400, 400, 400, 10)
    layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in pairwise(sizes)]
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(1024, 100, generator=g), torch.randint(0, 10, (1024,), generator=g)
    return nn.Sequential(*layers), list(zip(x, y, strict=True)), nn.functional.cross_entropy


MODELS = {"language": _language, "images": _images, "tables": _tables}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
}


def make(model: str, optimizer: str, precision: Any = "float32", global_batch: int = 32) -> ev.Recipe:
    """The recipe of a model, an optimiser and a precision."""
    torch.manual_seed(0)
    module, dataset, loss = MODELS[model]()
    return ev.Recipe(
        name=model,
        model=module,
        dataset=dataset,
        loss=loss,
        optimizer=OPTIMIZERS[optimizer],
        precision=precision,
        global_batch=global_batch,
    )


SCRIPT = """import sys
sys.path.insert(0, {root!r})
from benchmarks.rehearsal_models import make
def recipe():
    return make({model!r}, {optimizer!r}, {precision!r}, {global_batch})
"""
