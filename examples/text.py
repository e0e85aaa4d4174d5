"""A byte-level transformer on the text of the Python standard library: no download, nothing shipped.

    evener train examples/text.py --steps 120 --rehearse examples/fleets/8-4-2-2.json

The model reads 64 bytes and predicts the next one at each place. Two numbers to beat are printed beside
the held-out loss: the entropy of single bytes (unigram) and of a byte given the one before it (bigram).
"""

import sysconfig
from functools import cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import evener as ev

VOCABULARY = 256
CONTEXT = 64
WIDTH = 64
NUM_HEADS = 2
NUM_LAYERS = 2
GLOBAL_BATCH = 240
STEPS = 120  # what the schedule is made for
WARMUP_STEPS = 20
LEARNING_RATE = 0.01
HELDOUT_EVERY = 10  # every tenth file is held out
NOT_LIBRARY = {"site-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo"}


@cache
def read_text() -> tuple[np.ndarray, np.ndarray]:
    """Training and held-out bytes: all modules of the library in the order of their paths."""
    root = Path(sysconfig.get_paths()["stdlib"])
    names = sorted(p.relative_to(root).as_posix() for p in root.rglob("*.py"))
    names = [n for n in names if not NOT_LIBRARY & set(n.split("/"))]
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for number, name in enumerate(names):
        parts[number % HELDOUT_EVERY == HELDOUT_EVERY - 1].append((root / name).read_bytes())
    train, heldout = (np.frombuffer(b"".join(part), dtype=np.uint8) for part in parts)
    return train, heldout


def entropies(text: np.ndarray) -> dict[str, float]:
    """Entropy of a byte, alone and given the byte before it, in nats per byte."""
    pairs = np.bincount(text[:-1].astype(np.int64) * VOCABULARY + text[1:], minlength=VOCABULARY**2)
    joint = _entropy(pairs)
    single = _entropy(pairs.reshape(VOCABULARY, VOCABULARY).sum(axis=1))
    return {"unigram_nats_per_byte": single, "bigram_nats_per_byte": joint - single}


def _entropy(counts: np.ndarray) -> float:
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())


class Windows(Dataset):
    """`num` windows of `CONTEXT` bytes spread evenly over the text, each with the bytes that follow."""

    def __init__(self, text: np.ndarray, num: int | None = None) -> None:
        most = (len(text) - 1) // CONTEXT
        self.text, self.num = torch.from_numpy(text.copy()), min(num or most, most)
        self.stride = (len(text) - 1 - CONTEXT) // max(1, self.num - 1) if num else CONTEXT

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.stride
        window = self.text[start : start + CONTEXT + 1].long()
        return window[:-1], window[1:]


class Block(nn.Module):
    """Causal attention and a feed-forward part, each added to what goes through."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_attention, self.norm_mlp = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.down.weight)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, length, 3, NUM_HEADS, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(F.relu(self.up(self.norm_mlp(x))).square())


class ByteTransformer(nn.Module):
    """Bytes in, logits of the next byte out. Each place also sees the embedding of the byte before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.embed_before = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(0.02 * torch.randn(CONTEXT, WIDTH))
        self.blocks = nn.Sequential(*(Block() for _ in range(NUM_LAYERS)))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        for table in (self.embed, self.embed_before):
            nn.init.normal_(table.weight, std=0.1)
        nn.init.normal_(self.head.weight, std=0.05)  # at zero the first 40 steps would learn next to nothing
        nn.init.zeros_(self.head.bias)

    def forward(self, text: Tensor) -> Tensor:
        before = F.pad(text[:, :-1], (1, 0))
        x = self.embed(text) + self.embed_before(before) + self.position[: text.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def nats_per_byte(logits: Tensor, target: Tensor) -> Tensor:
    """Mean cross-entropy over all places."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def learning_rate_factor(samples_seen: int) -> float:
    """Up in a straight line over the warm-up, then down to a twentieth at the last step."""
    steps = samples_seen / GLOBAL_BATCH
    return min(1.0, (steps + 1) / WARMUP_STEPS) * max(0.05, 1 - steps / STEPS)


def recipe() -> ev.Recipe:
    """What `evener train` runs."""
    train, heldout = read_text()
    return ev.Recipe(
        name="text",
        model=ByteTransformer(),
        dataset=Windows(train),
        heldout=Windows(heldout, num=512),
        loss=nats_per_byte,
        reduction="mean",
        optimizer=lambda params: torch.optim.AdamW(
            params, lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0
        ),
        schedule=learning_rate_factor,
        global_batch=GLOBAL_BATCH,
        figures=entropies(heldout),
    )
