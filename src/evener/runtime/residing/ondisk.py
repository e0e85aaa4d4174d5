"""The optimiser's state in a file of the host's disk: in memory is only what is being stepped on.

file      │ exp_avg, exp_avg_sq of leaf 0 │ … of leaf 1 │ … of leaf 2 │     mapped; views of it are the state
step        small leaves together, in memory │ leaf 0 │ leaf 1 │ leaf 2
disk                                  read 1 │ read 2 ▒ write 0 │ write 1

The file has no name: nothing is left of it, whatever ends the process, and two jobs cannot meet in one.
"""

import mmap
import os
import shutil
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from evener.errors import EnvironmentBrokenError, UsageError
from evener.runtime.checkpoints.shards import Later
from evener.runtime.owning.optimizer import started, trial_of

LEAST_BYTES = 2**16
"""A parameter with fewer keeps its state in memory: a page and a call would cost more than they spare."""
_SHAPE = (160, 136)  # beyond the smallest sizes from which optimisers factor or pack: 128, 4096
_STEPS = 3
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


class StateOnDisk:
    """State of `parameters` in a file of `folder`, as large as all of it, which is there from `open` on.

    Of each parameter's state it holds the tensors of the parameter's own shape. `on_disk(read, written)` is
    told the bytes of each step. Who reads the state beside the training holds `reading`: a step waits for it.
    """

    def __init__(
        self,
        parameters: Collection[nn.Parameter],
        folder: Path,
        on_disk: Callable[[int, int], None] = lambda read, written: None,
        *,
        least_bytes: int = LEAST_BYTES,
    ) -> None:
        self._wanted = {p for p in parameters if p.requires_grad and p.nbytes >= least_bytes}
        self._folder, self._on_disk = folder, on_disk
        self._views: dict[nn.Parameter, dict[str, Tensor]] = {}
        self._places: dict[nn.Parameter, tuple[int, int]] = {}  # first byte, number of bytes
        self.num_bytes = 0
        self.reading = threading.Lock()

    def open(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the file for what `optimizer` will keep, which a trial of it shows.

        Raises UsageError for one that does not move each parameter by itself, EnvironmentBrokenError where
        the disk has no room.
        """
        layout: dict[nn.Parameter, dict[str, torch.dtype]] = {}
        tried: dict[tuple, dict[str, torch.dtype]] = {}
        for number, group in enumerate(optimizer.param_groups):
            for p in group["params"]:
                if p in self._wanted:
                    like = number, p.dtype, p.dim() > 1
                    tried[like] = tried[like] if like in tried else _kept_by(optimizer, group, p)
                    layout[p] = tried[like]
        offsets: dict[nn.Parameter, dict[str, int]] = {}
        end = 0
        for p, kept in layout.items():
            first, offsets[p] = end, {}
            for key, dtype in kept.items():
                offsets[p][key] = end
                end += -(-p.numel() * dtype.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE
            self._places[p] = first, end - first
        self._places = {p: place for p, place in self._places.items() if place[1]}
        self.num_bytes = end
        if not end:
            return
        self._file = _file(self._folder, end)
        self._map = mmap.mmap(self._file.fileno(), end)
        self._base = torch.frombuffer(self._map, dtype=torch.uint8).data_ptr()
        self._buffer = torch.empty(max(size for _, size in self._places.values()), dtype=torch.uint8)
        for p in self._places:
            self._views[p] = {
                key: torch.frombuffer(self._map, dtype=dtype, count=p.numel(), offset=offsets[p][key]).view(
                    p.shape
                )
                for key, dtype in layout[p].items()
            }

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """`optimizer.step()`, with the state of one parameter after the other in memory."""
        groups = optimizer.param_groups
        with self.reading, _hooks_around(optimizer):
            with _only(optimizer, [(g, [p for p in g["params"] if p not in self._places]) for g in groups]):
                optimizer.step()
            leaves = [(g, p) for g in groups for p in g["params"] if p in self._places and p.grad is not None]
            if leaves:
                self._come(leaves[0][1])
            read = written = 0
            for k, (group, p) in enumerate(leaves):
                if k + 1 < len(leaves):
                    self._come(leaves[k + 1][1])
                with self._in_memory(optimizer, p) as found, _only(optimizer, [(group, [p])]):
                    optimizer.step()
                read += self._places[p][1] if found else 0
                written += self._places[p][1]
                if k:
                    self._let_go(leaves[k - 1][1])  # what was still being written then
        self._on_disk(read, written)

    @contextmanager
    def _in_memory(self, optimizer: torch.optim.Optimizer, p: nn.Parameter) -> Iterator[bool]:
        """What is kept for `p` is read at once and written at once: faults, page by page, take longer.

        Whether there is any yet.
        """
        kept, views, (first, size) = optimizer.state[p], self._views[p], self._places[p]
        found = all(key in kept for key in views)
        if found:
            self._take_in(optimizer, p)  # after a change of devices it is where the one before had it
            whole = self._buffer.numpy().data[:size]
            _all_of(os.preadv, self._file.fileno(), whole, first)
            here = {}
            for key, view in views.items():
                at = view.data_ptr() - self._base - first
                here[key] = self._buffer[at : at + view.nbytes].view(view.dtype).view(view.shape)
            kept.update(here)
        yield found
        if found:
            for key, mine in here.items():
                if kept[key].data_ptr() != mine.data_ptr():
                    mine.copy_(kept[key])
            kept.update(views)
            _all_of(os.pwritev, self._file.fileno(), whole, first)
        self.adopt(optimizer, p)

    def adopt(self, optimizer: torch.optim.Optimizer, p: Tensor) -> None:
        """What `optimizer` keeps for `p` lies in the file, wherever it was put, and leaves memory."""
        if not isinstance(p, nn.Parameter) or p not in self._places:
            return
        self._take_in(optimizer, p)
        self._let_go(p)

    def _take_in(self, optimizer: torch.optim.Optimizer, p: nn.Parameter) -> None:
        kept = optimizer.state.get(p, {})
        for key, view in self._views[p].items():
            value = kept.get(key)
            if value is not None and value.data_ptr() != view.data_ptr():
                kept[key] = view.copy_(value)

    def later(self, tensors: Mapping[str, Tensor]) -> dict[str, Later]:
        """Those of `tensors` that lie in the file, to be read one by one by who holds `reading`."""
        places = {v.data_ptr(): p for p, views in self._views.items() for v in views.values()}
        return {
            name: Later(torch.empty_like(t, device="meta"), partial(self._read, places[t.data_ptr()], t))
            for name, t in tensors.items()
            if t.device.type == "cpu" and t.numel() and t.data_ptr() in places
        }

    def _read(self, p: nn.Parameter, tensor: Tensor) -> Tensor:
        copy = tensor.clone()
        self._let_go(p)
        return copy

    def _come(self, p: nn.Parameter) -> None:
        """Start reading what is kept for `p`."""
        os.posix_fadvise(self._file.fileno(), *self._places[p], os.POSIX_FADV_WILLNEED)

    def _let_go(self, p: nn.Parameter) -> None:
        """Start writing what changed of `p`'s state, and give up what memory has of the rest."""
        first, size = self._places[p]
        self._map.madvise(mmap.MADV_DONTNEED, first, size)  # of a shared mapping: nothing is lost
        os.posix_fadvise(self._file.fileno(), first, size, os.POSIX_FADV_DONTNEED)


def _all_of(move: Callable[[int, list[memoryview], int], int], fd: int, data: memoryview, first: int) -> None:
    """Read or write all of `data`, from byte `first` of a file on."""
    done = 0
    while done < len(data):
        done += move(fd, [data[done:]], first + done)


def _file(folder: Path, num_bytes: int) -> "tempfile._TemporaryFileWrapper[bytes]":
    """A file of so many bytes without a name, all of them on the disk already."""
    free = shutil.disk_usage(folder).free
    try:
        if free < num_bytes:
            raise OSError(f"{free} bytes are free")
        file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        os.posix_fallocate(file.fileno(), 0, num_bytes)
    except OSError as e:
        raise EnvironmentBrokenError(
            f"the optimiser's state finds no room on the disk of {folder}: {e.strerror or e}",
            numbers=f"{num_bytes} bytes needed, {free} free",
            remedy="--run-dir on another disk, room on this one, or a plan without state_on_disk",
        ) from e
    return file  # type: ignore[return-value]


@contextmanager
def _hooks_around(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """What waits for a step of `optimizer` hears of one, whatever it is made of inside."""
    before, after = hooks = [getattr(optimizer, name) for name in _HOOKS]
    for hook in before.values():
        hook(optimizer, (), {})
    try:
        for name in _HOOKS:
            setattr(optimizer, name, OrderedDict())
        yield
    finally:
        for name, own in zip(_HOOKS, hooks, strict=True):
            setattr(optimizer, name, own)
    for hook in after.values():
        hook(optimizer, (), {})


@contextmanager
def _only(
    optimizer: torch.optim.Optimizer, parts: Sequence[tuple[dict, list[nn.Parameter]]]
) -> Iterator[None]:
    """`optimizer` has only these parameters of its groups."""
    groups = optimizer.param_groups
    try:
        optimizer.param_groups = [{**group, "params": ps} for group, ps in parts]
        yield
    finally:
        optimizer.param_groups = groups


def _kept_by(optimizer: torch.optim.Optimizer, group: dict, p: nn.Parameter) -> dict[str, torch.dtype]:
    """The state that `optimizer` keeps in the shape of a parameter like `p`, by key.

    UsageError where two parameters one after the other do not end, to the bit, where both together do.
    """
    generator = torch.Generator().manual_seed(0)
    shape = _SHAPE if p.dim() > 1 else (_SHAPE[0] * _SHAPE[1],)

    def drawn() -> list[Tensor]:
        return [torch.randn(shape, generator=generator).to(p.dtype) for _ in range(2)]

    values, gradients = drawn(), [drawn() for _ in range(_STEPS)]
    ends = []
    with torch.random.fork_rng(devices=[]):
        for together in (True, False):
            torch.manual_seed(0)
            ps = [nn.Parameter(v.clone()) for v in values]
            states = {q: started(optimizer, group, q.detach()) for q in ps}
            trial = trial_of(optimizer, {**group, "params": ps}, states)
            for of_step in gradients:
                for q, gradient in zip(ps, of_step, strict=True):
                    q.grad = gradient.clone()
                if together:
                    trial.step()
                    continue
                for q in ps:
                    with _only(trial, [(trial.param_groups[0], [q])]):
                        trial.step()
            ends.append(ps)
    if not all(torch.equal(a, b) for a, b in zip(*ends, strict=True)):
        raise UsageError(
            f"{type(optimizer).__name__} does not move each parameter by itself: its state cannot be on disk",
            remedy="another optimiser, or a plan without state_on_disk",
        )
    kept = trial.state[ps[0]]
    return {key: v.dtype for key, v in kept.items() if isinstance(v, Tensor) and v.shape == shape}
