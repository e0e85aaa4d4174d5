"""The profiler around one step: which step, which names, and what other tools are told."""

import contextlib

import pytest
import torch

from evener.core.files import encode
from evener.report.profiled import is_action, read_profiled
from evener.session.loop.profiled import StepProfiler, write_profiled


def work(profiler: StepProfiler, number: int) -> None:
    with profiler.step(number):
        for action in ("0F0", "0B0", "STEP"):
            with profiler.range(action):
                torch.ones(8, 8) @ torch.ones(8, 8)


def test_one_step_is_profiled_and_no_other() -> None:
    profiler = StepProfiler(2, "lab/a", torch.device("cpu"))
    work(profiler, 1)
    assert profiler.found is None
    work(profiler, 2)
    found = profiler.found
    assert found is not None and (found.device, found.type, found.step) == ("lab/a", "cpu", 2)
    assert [e.name for e in found.events if is_action(e)] == ["0F0", "0B0", "STEP"]
    assert sum(e.name == "aten::mm" for e in found.events) == 3
    work(profiler, 2)
    assert profiler.found is found, "a step that is redone is profiled once"


def test_a_step_that_fails_is_no_profile() -> None:
    profiler = StepProfiler(0, "lab/a", torch.device("cpu"))
    with pytest.raises(ValueError, match="no"), profiler.step(0):
        raise ValueError("no")
    assert profiler.found is None


def test_on_cuda_and_rocm_the_ranges_reach_other_tools(monkeypatch) -> None:
    """torch.cuda.nvtx is what Nsight sees, and rocprof through torch's own mapping to roctx."""
    told: list[str] = []

    @contextlib.contextmanager
    def nvtx(name: str):
        told.append(f"> {name}")
        yield
        told.append(f"< {name}")

    monkeypatch.setattr(torch.cuda.nvtx, "range", nvtx)
    profiler = StepProfiler(0, "lab/a", torch.device("cuda", 0))
    profiler._running = True
    with profiler.range("2F0"):
        told.append("work")
    assert told == ["> 2F0", "work", "< 2F0"]
    profiler._running = False
    with profiler.range("2F1"):
        pass
    assert len(told) == 3


class Room:
    """A part of the job's store that holds what it was given."""

    def __init__(self, held: dict[str, object]) -> None:
        self.held = held

    def has(self, key: str) -> bool:
        return key in self.held

    def get(self, key: str, shape: type) -> object:
        assert encode(self.held[key])
        return self.held[key]


def test_what_the_devices_hand_in_becomes_one_file(tmp_path) -> None:
    profiler = StepProfiler(0, "lab/a", torch.device("cpu"))
    work(profiler, 0)
    said = write_profiled(Room({"profiled/lab/a": profiler.found}), ("lab/a", "lab/gone"), 0, tmp_path)
    assert "step 0 ran under torch's profiler on 1 device" in said
    assert len(read_profiled((tmp_path / "profiled-step.json").read_bytes())) == 1
    assert write_profiled(Room({}), ("lab/a",), 9, tmp_path) == (
        "no step was profiled: step 9 was not reached"
    )
