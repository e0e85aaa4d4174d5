"""Small models of many families, with data and losses: what plan shapes are tried on."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

WORDS, LENGTH, CLASSES, IGNORE = 11, 6, 3, -100
TOKENS = {"bos_token_id": 0, "eos_token_id": 0}


@dataclass(frozen=True, kw_only=True)
class Family:
    """How a family's model is built and what it learns from: images, rows of numbers, or words.

    `takes_ids`: called by keyword, with an output that has logits, as Hugging Face models are.
    `always_float32`: some of its layers compute in float32, whatever the model's dtype.
    """

    build: Callable[[], nn.Module]
    data: str
    takes_ids: bool = False
    always_float32: bool = False


def sequential() -> nn.Module:
    """Eight layers, four of them without parameters."""
    sizes = (5, 6, 7, 6, CLASSES)
    pairs = [(nn.Linear(a, b), nn.Tanh()) for a, b in pairwise(sizes)]
    return nn.Sequential(*(layer for pair in pairs for layer in pair))


class Block(nn.Module):
    """A transformer's block, attention spelt out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        scores = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(mask, float("-inf"))
        return x + self.mix(scores.softmax(-1) @ v)


class Text(nn.Module):
    """A byte transformer: positions hang on the model, a mask without samples crosses all cuts, head tied."""

    def __init__(self, width: int = 6, depth: int = 3) -> None:
        super().__init__()
        self.position = nn.Parameter(0.1 * torch.randn(LENGTH, width))
        self.embed = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words) + self.position
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(2, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.norm(self.conv(x)))


def residual_net() -> nn.Module:
    """Convolutions with residual sums inside the blocks."""
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, CLASSES))
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), *(Residual(4) for _ in range(4)), *head)


class UNet(nn.Module):
    """Two steps down, two up: what the first layers gave is needed by the last ones, across every cut."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.down = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 6, 3, stride=2, padding=1)
        self.deep = nn.Conv2d(6, 6, 3, stride=2, padding=1)
        self.up, self.out = nn.Conv2d(12, 4, 3, padding=1), nn.Conv2d(8, CLASSES, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.enter(x).tanh()
        b = self.down(a).tanh()
        c = nn.functional.interpolate(self.deep(b).tanh(), scale_factor=2)
        d = nn.functional.interpolate(self.up(torch.cat([b, c], 1)).tanh(), scale_factor=2)
        return self.out(torch.cat([a, d], 1)).amax((2, 3))


class Encoded(nn.Module):
    """Encoder and decoder: every decoder layer looks at what the encoder made."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.encoder = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.decoder = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(3))
        self.head = nn.Linear(width, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        memory = self.embed(words)
        for layer in self.encoder:
            memory = layer(memory).tanh()
        x = self.embed(words.flip(1))
        for layer in self.decoder:
            x = x + layer(torch.cat([x, memory], -1)).tanh()
        return self.head(x)


class Recurrent(nn.Module):
    """Three LSTM layers; states are tuples, which cross no cut, and outputs do."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(3))
        self.head = nn.Linear(width, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for layer in self.layers:
            x, _ = layer(x)
        return self.head(x)


def gpt2() -> nn.Module:
    """Hugging Face's GPT-2, tiny, without dropout, head tied to the embedding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": WORDS, "n_positions": LENGTH, "n_embd": 8, "n_layer": 3, "n_head": 2}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **no_dropout, **TOKENS, attn_implementation="eager"))


def llama() -> nn.Module:
    """Hugging Face's Llama, tiny: rotary positions without samples cross every cut."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": WORDS, "hidden_size": 8, "intermediate_size": 12}
    heads = {"num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1}
    return LlamaForCausalLM(
        LlamaConfig(**sizes, **heads, **TOKENS, max_position_embeddings=LENGTH, attn_implementation="eager")
    )


FAMILIES = {
    "sequential": Family(build=sequential, data="rows"),
    "text": Family(build=Text, data="words"),
    "residual": Family(build=residual_net, data="images"),
    "unet": Family(build=UNet, data="images"),
    "encoder-decoder": Family(build=Encoded, data="words"),
    "lstm": Family(build=Recurrent, data="words"),
    "gpt2": Family(build=gpt2, data="words", takes_ids=True),
    "llama": Family(build=llama, data="words", takes_ids=True, always_float32=True),
}


def samples_for(family: str, count: int, dtype: torch.dtype, seed: int, *, masked: bool) -> list[Any]:
    """`count` (input, target) pairs; `masked` lets about half of the words' labels not count."""
    generator = torch.Generator().manual_seed(seed)
    if FAMILIES[family].data == "words":
        x = torch.randint(0, WORDS, (count, LENGTH), generator=generator)
        y = torch.randint(0, WORDS, (count, LENGTH), generator=generator)
        if masked:
            y[torch.rand(count, LENGTH, generator=generator) < 0.5] = IGNORE
            y[::3] = IGNORE  # whole samples, so that micro-batches without any weight occur
    else:
        shape = (count, 5) if FAMILIES[family].data == "rows" else (count, 2, 8, 8)
        x = torch.randn(*shape, generator=generator, dtype=torch.float64)
        y = torch.randint(0, CLASSES, (count,), generator=generator)
        if len(shape) == 4:
            # Bright and dark images: gradients of white noise cancel until only float32's rounding is left.
            x = x / 4 + y.view(count, 1, 1, 1)
        x = x.to(dtype)
    if FAMILIES[family].takes_ids:
        return [{"input_ids": a, "labels": b} for a, b in zip(x, y, strict=True)]
    return list(zip(x, y, strict=True))


def inputs_of(batch: Any) -> tuple[tuple, dict, Any]:
    """(args, kwargs, target) of a batch of any family."""
    if isinstance(batch, dict):
        return (), {"input_ids": batch["input_ids"], "use_cache": False}, batch["labels"]
    return (batch[0],), {}, batch[1]


def valid(batch: Any) -> Tensor:
    """How many labels count."""
    return (inputs_of(batch)[2] != IGNORE).sum()


@dataclass(frozen=True)
class Loss:
    """Cross-entropy over classes or words, a mean or a sum over the labels that count."""

    reduction: str

    def __call__(self, output: Any, target: Tensor) -> Tensor:
        logits = output if isinstance(output, Tensor) else output["logits"]
        logits = logits.reshape(-1, logits.shape[-1])
        return cross_entropy(logits, target.reshape(-1), ignore_index=IGNORE, reduction=self.reduction)
