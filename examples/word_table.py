"""A large table of words in host memory, an LSTM and a classifier on the accelerator: one line more.

    evener train examples/word_table.py --steps 60       on this host's devices
    evener train examples/word_table.py --steps 60 \\
        --rehearse examples/fleets/by-kind/one-card-to-rehearse.json

100,000 words of 128 numbers are 51 MB, under Adam with gradients four times that; a step of 64 sentences
touches about 900 of them. With `PLACE` the table stays in host memory: rows that a step looks up travel to
the device, their gradients back, and only those rows are updated. The result is the same.

The sentences are made here: every word leans towards one of four topics, rare words alike, and a sentence has
the topic that its words lean to most.
"""

import torch
from torch import Tensor, nn

import evener as ev

WORDS, DIM, HIDDEN, TOPICS, LENGTH = 100_000, 128, 64, 4, 20
SENTENCES, HELDOUT, GLOBAL_BATCH = 8192, 1024, 64
PLACE = {"embedding": "cpu"}  # the one line: {} has the table on the device, "auto" asks the planner


class Classifier(nn.Module):
    """The model of many tutorials."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, DIM)
        self.lstm = nn.LSTM(DIM, HIDDEN, batch_first=True)
        self.classifier = nn.Linear(HIDDEN, TOPICS)

    def forward(self, words: Tensor) -> Tensor:
        rows = self.embedding(words)
        _, (last, _) = self.lstm(rows)
        return self.classifier(last[-1])


def sentences(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """(words, topic): words by Zipf's law, seven in ten of them leaning to the topic."""
    generator = torch.Generator().manual_seed(seed)
    topic = torch.randint(0, TOPICS, (count,), generator=generator)
    drawn = torch.rand(count, LENGTH, generator=generator, dtype=torch.float64)
    words = (WORDS / TOPICS) ** drawn  # by rank: the density of x is 1 / x
    leans = torch.randint(0, TOPICS, (count, LENGTH), generator=generator)
    own = torch.rand(count, LENGTH, generator=generator) < 0.6
    leans = torch.where(own, topic[:, None], leans)
    return ((words.long() - 1) * TOPICS + leans).clamp(0, WORDS - 1), topic


def loss(output: Tensor, target: Tensor) -> tuple[Tensor, dict[str, tuple[Tensor, int]]]:
    """Mean cross-entropy, and how many topics are right."""
    right = (output.argmax(1) == target).sum()
    return nn.functional.cross_entropy(output, target), {"accuracy": (right, len(target))}


def recipe() -> ev.Recipe:
    """What `evener train` runs."""
    return ev.Recipe(
        name="word_table",
        model=Classifier(),
        dataset=torch.utils.data.TensorDataset(*sentences(SENTENCES, 1)),
        heldout=torch.utils.data.TensorDataset(*sentences(HELDOUT, 2)),
        loss=loss,
        reduction="mean",
        metrics=("accuracy",),
        optimizer=lambda params: torch.optim.Adam(params, lr=5e-3),
        global_batch=GLOBAL_BATCH,
        place=PLACE,
        figures={"accuracy_by_guessing": 1 / TOPICS},
    )
