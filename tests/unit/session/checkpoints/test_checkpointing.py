"""When a running job saves, and how often its devices ask the store."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from evener.runtime.checkpoints.manifest import Position
from evener.runtime.checkpoints.saving import Saved
from evener.runtime.ranks import Ranks
from evener.session.checkpoints.checkpointing import ANSWERS, ASKED, Checkpointing
from evener.session.checkpoints.save_rule import Keep, Rule
from evener.session.meeting import Meeting

EVERY = Rule(steps=1000, keep=Keep())
POSITION = Position(step=5, samples_seen=40, seed=0, global_batch=8, dataset_size=64)


class Asked(dist.HashStore):
    """A store that counts what it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.times = 0

    def check(self, keys: list[str]) -> bool:
        self.times += 1
        return super().check(keys)


def checkpointing(
    store: dist.Store, here: str, folder: Path, step_s: float | None, failures: list[str] | None = None
) -> Checkpointing:
    model = nn.Linear(1, 1)
    steps: Any = SimpleNamespace(
        ranks=Ranks(("lab/a", "lab/b"), here),
        plan=SimpleNamespace(prediction=step_s and SimpleNamespace(step_s=step_s)),
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        recipe=SimpleNamespace(model=model),
        meetings=None,
        decisions=[],
    )
    meeting = Meeting(store, 0, 2)
    return Checkpointing(EVERY, folder, meeting, steps, job=meeting, failures=failures)


def test_what_failed_before_a_change_of_devices_is_counted_at_the_end(tmp_path: Path) -> None:
    failures: list[str] = []
    before, after = (checkpointing(dist.HashStore(), "lab/a", tmp_path, 0.1, failures) for _ in range(2))
    for saving, why in ((before, "the disk is full"), (after, "it is full again")):
        saving.saver._report(Saved(path=None, why=why), POSITION, 1.0)
    assert after.failed.startswith("2 checkpoints could not be saved in ")
    assert after.failed.endswith("the last: it is full again")


@pytest.mark.parametrize(("step_s", "every"), [(0.1, 10), (1e-3, 32), (30.0, 1), (None, 1)])
def test_what_is_asked_for_is_looked_for_where_all_look(tmp_path: Path, step_s: float, every: int) -> None:
    """Each device asked before each step, which took the way to the store and back."""
    store = Asked()
    leader = checkpointing(store, "lab/a", tmp_path, step_s)
    follower = checkpointing(store, "lab/b", tmp_path, step_s)
    assert store.check([ANSWERS])
    store.times = 0
    for number in range(1, 129):
        leader.at_boundary(number)
        follower.at_boundary(number)
    assert store.times in range(2 * (128 // every) - 2, 2 * (128 // every) + 1)
    store.set(ASKED, "true")
    number = 129
    while leader._asked_for < 0:
        leader.at_boundary(number)
        number += 1
    assert number - 129 <= every and leader._asked_for % every == 0
    assert leader._is_agreed(number) and follower._is_agreed(number)
