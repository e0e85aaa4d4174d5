"""When a device copies its own sums: where that is worth it, and never where it cannot."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from evener.core.fleet import Device, Fleet
from evener.core.plan import Pipeline, Plan, Share, Stage
from evener.session.loop import keeping
from evener.session.loop.keeping import Keeping

NAMES = ("lab/a", "lab/b")


class Reducers:
    """Remembers what it was told."""

    def __init__(self, copied_s: float) -> None:
        self.copied_s = copied_s
        self.told: list[bool] = []
        self.ended: Any = None

    def hold_back(self, ended: Any) -> None:
        self.ended = ended

    def outlast(self, *, yes: bool) -> None:
        self.told.append(yes)


def pipeline(*devices: str) -> Pipeline:
    layers = "xyz"[: len(devices)]
    stages = tuple(
        Stage(layers=(n,), shares=(Share(devices=(d,), samples=2),))
        for n, d in zip(layers, devices, strict=True)
    )
    return Pipeline(samples=2, micro_batch=2, stages=stages)


DATA_PARALLEL = Plan(global_batch=4, pipelines=tuple(pipeline(d) for d in NAMES))
IN_A_ROW = Plan(global_batch=2, pipelines=(pipeline(*NAMES),))
EXECUTOR: Any = SimpleNamespace(in_flight=True, keep=lambda range_of: (None, "it is torn"))


def keeping_of(
    reducers: Reducers, plan: Plan = DATA_PARALLEL, norms: tuple[str, ...] = (), tables: tuple[str, ...] = ()
) -> Keeping:
    layout: Any = SimpleNamespace(
        tables=SimpleNamespace(tables=tables),
        holding=SimpleNamespace(reducers=reducers),
        norms={0: norms},
        parameters={"w": torch.nn.Parameter(torch.zeros(8))},
    )
    device = Device(name="lab/a", kind="cpu")
    site: Any = SimpleNamespace(torch_device=torch.device("cpu"), device=device)
    fleet = Fleet(devices=tuple(Device(name=n, kind="cpu") for n in NAMES))
    return Keeping(layout, plan, site, fleet, lambda: "gone")


def why(kept: Keeping) -> str:
    return kept.keep(EXECUTOR, lambda stage, micro_batch: (0, 0))[1]


def test_copies_go_on_while_a_step_is_long_enough_for_them() -> None:
    reducers = Reducers(copied_s=0.004)
    kept = keeping_of(reducers)
    for step_s in (1.0, 10.0, 1.0, 10.0):  # the first one is not looked at
        kept.after_step(step_s)
    assert reducers.told == [True, True, False, True] and reducers.ended() == "gone"
    assert why(kept) == "it is torn"
    kept.after_step(1.0)
    assert why(kept).startswith("it is torn (a copy of its gradients takes 4 ms of a step of 1 s; no more")


def test_without_room_nothing_is_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(keeping.psutil, "virtual_memory", lambda: SimpleNamespace(available=100))
    reducers = Reducers(copied_s=0.0)
    kept = keeping_of(reducers)
    kept.after_step(1.0)
    kept.after_step(1.0)
    assert reducers.told == [False] and reducers.ended is not None
    assert why(kept) == "it is torn (no room for a copy of its gradients: 32 B, 100 B are free on its host)"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"plan": IN_A_ROW}, "the plan cuts the model"),
        ({"norms": ("bn",)}, "in BatchNorm's waves"),
        ({"tables": ("word",)}, "gradients of a placed table's rows are summed where the rows are"),
    ],
)
def test_where_gradients_are_not_of_own_samples_alone_nothing_is_kept(more: dict, said: str) -> None:
    reducers = Reducers(copied_s=0.0)
    kept = keeping_of(reducers, **more)
    kept.after_step(1.0)
    kept.after_step(1.0)
    assert reducers.told == [] and reducers.ended is None
    assert why(kept).startswith(said)
