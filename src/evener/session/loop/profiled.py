"""Torch's profiler over one step of this device, its actions as named ranges.

torch.profiler   record_function("2F0")      in profiled-step.json, beside the operators and kernels in it
Nsight, rocprof  torch.cuda.nvtx "2F0"       whatever tool is attached; torch maps it to roctx on ROCm
"""

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path

import msgspec
import torch
from torch.profiler import profile, record_function, supported_activities

from evener.core.files import write_bytes
from evener.core.words import counted
from evener.report.profiled import DeviceProfile, from_kineto, left_out_note, merged
from evener.session.meeting import Meeting


class StepProfiler:
    """Profiles step `number` on `device`, called `name`; `found` is what it saw, None before that step.

    Used as `ranges` of the runtime's settings: it names each action, and does nothing in other steps.
    """

    def __init__(self, number: int, name: str, device: torch.device) -> None:
        self.number, self.name, self.device = number, name, device
        self.found: DeviceProfile | None = None
        self._running = False
        # Where torch carries its library's log, every start and stop of a profile would be printed.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")

    def range(self, action: str) -> AbstractContextManager[object]:
        """A range called `action` while the profiled step runs."""
        if not self._running:
            return nullcontext()
        stack = ExitStack()
        stack.enter_context(record_function(action))
        if self.device.type == "cuda":
            stack.enter_context(torch.cuda.nvtx.range(action))
        return stack

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around step `number` of the run."""
        if number != self.number or self.found is not None:
            yield
            return
        # What autograd and the reductions do on threads of their own belongs to the step as well.
        with profile(activities=list(supported_activities()), acc_events=True) as profiler:
            self._running = True
            try:
                yield
                if self.device.type != "cpu":
                    torch.accelerator.synchronize(self.device)
            finally:
                self._running = False
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            raw = msgspec.json.decode(path.read_bytes())
        self.found = from_kineto(raw, device=self.name, type_=self.device.type, step=number)


def write_profiled(room: Meeting, devices: Sequence[str], step: int, folder: Path) -> str:
    """Merge what the devices handed in into profiled-step.json; the sentence about it."""
    found = [room.get(f"profiled/{d}", DeviceProfile) for d in devices if room.has(f"profiled/{d}")]
    if not found:
        return f"no step was profiled: step {step} was not reached"
    write_bytes(folder / "profiled-step.json", merged(found))
    notes = [left_out_note(p) for p in found if p.left_out]
    told = f"step {step} ran under torch's profiler on {counted(len(found), 'device')}, which makes it slower"
    return "; ".join([f"{told}: profiled-step.json", *notes])
