"""A process's way from one generation to the next."""

import gc
import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from evener.errors import PeerLostError
from evener.session import worker


class Steps:
    """Steps that hold themselves, as those of a run do, and with them the room for all gradients."""

    def __init__(self) -> None:
        self.number, self.itself = 0, self


def test_what_a_generation_held_is_free_before_the_next_one_is_formed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its buckets stayed until Python looked for circles: a full accelerator had no second room for them."""
    held: list[weakref.ref[Steps]] = []
    seen: list[bool] = []

    def form(member: Any, generation: Any) -> None:
        seen.extend(ref() is None for ref in held)
        generation.steps = Steps()
        held.append(weakref.ref(generation.steps))
        if generation.number == 1:
            raise PeerLostError("lab/b is gone")

    monkeypatch.setattr(worker, "Journal", lambda *_: nullcontext(SimpleNamespace(add=list)))
    monkeypatch.setattr(worker, "form", form)
    monkeypatch.setattr(worker, "train", lambda *_: True)
    monkeypatch.setattr(worker, "conclude", lambda *_: None)
    monkeypatch.setattr(worker, "_finish", lambda *_: None)
    monkeypatch.setattr(worker, "tear_down", lambda *_: None)
    monkeypatch.setattr(worker, "_can_go_on", lambda *_: True)
    turn = SimpleNamespace(step=0)
    monkeypatch.setattr(worker, "_next", lambda *_: (2, turn))
    meeting = SimpleNamespace(within=lambda name: None, has=lambda key: False, answers=lambda: True)
    site = SimpleNamespace(torch_device=torch.device("cpu"))
    member = SimpleNamespace(request=None, recipe=None, meeting=meeting, site=site, records=[])
    gc.disable()
    try:
        worker._live(member, turn, 1)  # type: ignore[arg-type]
    finally:
        gc.enable()
    assert seen == [True]
