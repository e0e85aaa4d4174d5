"""A small convolutional net on Fashion-MNIST, from the Debian package dataset-fashion-mnist.

    evener train examples/images.py --steps 100 --rehearse examples/fleets/one-fast-three-slow.json

Without that package, EVENER_EXAMPLE_DATA=digits takes the 1,797 digits that scikit-learn brings.
"""

import gzip
import math
import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import evener as ev
from evener.errors import DataError, EnvironmentBrokenError, UsageError

FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
NUM_CLASSES = 10
GLOBAL_BATCH = 400
LEARNING_RATE = 3e-3
NUM_HELDOUT = 2000


def read_idx(path: Path) -> np.ndarray:
    """The array in a gzipped IDX file: 0, 0, the type (8: bytes), the number of sizes, the sizes."""
    try:
        raw = gzip.decompress(path.read_bytes())
    except OSError as e:
        raise DataError(
            f"cannot read {path}: {e.strerror or e}",
            remedy="`apt-get install dataset-fashion-mnist`, or EVENER_EXAMPLE_DATA=digits for small digits",
        ) from e
    shape = [int.from_bytes(raw[4 + 4 * i : 8 + 4 * i], "big") for i in range(raw[3])]
    return np.frombuffer(raw, dtype=np.uint8, offset=4 + 4 * len(shape)).reshape(shape)


def fashion_mnist() -> tuple[TensorDataset, TensorDataset]:
    """60,000 images to train on and the first 2,000 of the test set, 28 x 28."""
    parts = []
    for name, most in (("train", 60_000), ("t10k", NUM_HELDOUT)):
        images = read_idx(FASHION_MNIST / f"{name}-images-idx3-ubyte.gz")[:most]
        labels = read_idx(FASHION_MNIST / f"{name}-labels-idx1-ubyte.gz")[:most]
        parts.append(as_dataset(images / np.float32(255), labels))
    return parts[0], parts[1]


def digits() -> tuple[TensorDataset, TensorDataset]:
    """scikit-learn's 8 x 8 digits, each pixel three times in both directions; every sixth is held out."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as e:
        raise EnvironmentBrokenError(f"no digits: {e}", remedy="pip install scikit-learn") from e
    data = load_digits()
    images = (data.images / 16).repeat(3, axis=1).repeat(3, axis=2)
    held = np.arange(len(images)) % 6 == 5
    return as_dataset(images[~held], data.target[~held]), as_dataset(images[held], data.target[held])


def as_dataset(images: np.ndarray, labels: np.ndarray) -> TensorDataset:
    """Grey images in 0..1 as (1, height, width) tensors, centred, with whole-number labels."""
    pixels = torch.from_numpy(images.astype(np.float32)).unsqueeze(1)
    return TensorDataset((pixels - 0.3) / 0.35, torch.from_numpy(labels.astype(np.int64)))


class ImageNet(nn.Sequential):
    """Three convolutions, averages over nine places, one linear layer. GroupNorm knows no batch."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 32, 5, stride=2, padding=2),
            nn.GroupNorm(4, 32),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, stride=2, padding=1),
            nn.GroupNorm(8, 64),
            nn.ReLU(),
            nn.Conv2d(64, 128, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(3),
            nn.Flatten(),
            nn.Linear(9 * 128, NUM_CLASSES),
        )


def nats_per_image(logits: Tensor, labels: Tensor) -> tuple[Tensor, dict]:
    """Mean cross-entropy, and how many were right as (sum, count)."""
    right = (logits.argmax(dim=1) == labels).sum()
    return nn.functional.cross_entropy(logits, labels), {"accuracy": (right, len(labels))}


def recipe() -> ev.Recipe:
    """What `evener train` runs. EVENER_EXAMPLE_DATA says which data: fashion-mnist (default) or digits."""
    sources = {"fashion-mnist": fashion_mnist, "digits": digits}
    which = os.environ.get("EVENER_EXAMPLE_DATA", "fashion-mnist")
    if which not in sources:
        raise UsageError(f"EVENER_EXAMPLE_DATA is {which!r}", remedy=f"one of: {', '.join(sources)}")
    dataset, heldout = sources[which]()
    return ev.Recipe(
        name=f"images-{which}",
        model=ImageNet(),
        dataset=dataset,
        heldout=heldout,
        loss=nats_per_image,
        reduction="mean",
        metrics=("accuracy",),
        optimizer=lambda params: torch.optim.AdamW(params, lr=LEARNING_RATE),
        global_batch=GLOBAL_BATCH,
        figures={"guessing_nats_per_image": math.log(NUM_CLASSES)},
    )
