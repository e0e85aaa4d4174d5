"""A stage whose parameters live in host memory: which layers are on the device, and when.

    forward     0   1   2   3        computing layer k, layer k+1 comes; layer k-1 has gone
    there      0 1 1 2 2 3  3 2
    backward    3   2   1   0        the other way round; at both turns nothing needs to come again
    there      3 2 2 1 1 0  0 1

The model keeps the user's own parameters, on the host. While a layer runs, guests on the device stand in
their place; its backward finds them again through what was saved for it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from evener.errors import ModelError
from evener.runtime.batchnorm import keeping_statistics
from evener.runtime.residing.flow import Flow
from evener.runtime.residing.order import Order
from evener.runtime.residing.pieces import Piece
from evener.runtime.residing.returning import Returning

Place = tuple[nn.Module, str, nn.Parameter]


@dataclass(frozen=True)
class _Parked:
    """A view of a piece in place of what a graph would have saved."""

    unit: int
    piece: Piece
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass
class _Unit:
    """A layer: where its parameters hang, and the pieces that they are in."""

    module: nn.Module
    places: list[Place] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)


class Residing:
    """`module`'s parameters on the host, each of `layers` on `device` while it runs.

    With `stay` they stay on the device once they came, and come again when the host has changed them; their
    gradients stay there too. Else two layers are there at a time, and gradients go to the host as they are
    made. With `recompute` each layer keeps only what enters it. Parameters outside of all layers, and those
    of `direct` (module, name), which are used outside of their layer, are always there. Buffers are moved to
    the device for good.
    """

    def __init__(
        self,
        module: nn.Module,
        layers: Sequence[nn.Module],
        device: torch.device,
        *,
        stay: bool,
        recompute: bool = False,
        direct: Sequence[tuple[nn.Module, str]] = (),
    ) -> None:
        self.stay, self.recompute, self.device = stay, recompute, device
        self.flow = Flow(device)
        module.to("cpu")
        _move_buffers(module, device)
        self._units = [_Unit(layer) for layer in layers]
        self._always = _Unit(module)
        self._guests: dict[nn.Parameter, nn.Parameter] = {}
        self.pieces = self._made(module, {id(owner._parameters[key]) for owner, key in direct})
        self._order = Order(len(self._units))
        self._by_storage: dict[int, Piece] = {}
        self.returning = Returning(self.pieces, self.flow)
        self._guards = [
            p.register_hook(_Outside(name)) for name, p in module.named_parameters() if p.requires_grad
        ]
        for number, unit in enumerate(self._units):
            before = unit.module.__dict__.get("forward")  # which a user may have put there
            if isinstance(before, _Visit):  # nobody closed it: a device was lost before the first step
                before = before.before
            plain = before or partial(type(unit.module).forward, unit.module)
            unit.module.forward = _Visit(self, number, plain, before)  # type: ignore[method-assign]

    def has(self, parameter: nn.Parameter) -> bool:
        """Whether `parameter` is one of this stage's."""
        return parameter in self._guests

    def guest_of(self, parameter: nn.Parameter) -> nn.Parameter:
        """The leaf that stands for `parameter` in the graph."""
        return self._guests[parameter]

    @contextmanager
    def forward(self) -> Iterator[None]:
        """A forward of the stage."""
        self._order.begin_forward(learns=torch.is_grad_enabled())
        self._bring(self._always.pieces)
        with _hosting(self._always.places, self._guests):
            yield

    @contextmanager
    def backward(self) -> Iterator[None]:
        """A backward of the stage; when it ends, its gradients have landed."""
        self._order.begin_backward()
        try:
            yield
        except BaseException:
            self.returning.forget()
            raise
        self.land()

    def land(self) -> None:
        """Gradients that were made have arrived where they are summed."""
        if not self.stay:
            self.returning.flush()

    def call(self, number: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Layer `number`'s forward, with its parameters there."""
        unit = self._units[number]
        if self.recompute and torch.is_grad_enabled():

            def twice() -> tuple[Any, Any]:
                return ExitStack(), keeping_statistics(unit.module)

            return checkpoint(
                lambda *a, **k: self._visit(number, forward, a, k),
                *args,
                use_reentrant=False,
                context_fn=twice,
                **kwargs,
            )
        parked = not self.stay and torch.is_grad_enabled()
        with saved_tensors_hooks(self._pack(number), self._unpack) if parked else ExitStack():
            return self._visit(number, forward, args, kwargs)

    def close(self) -> None:
        """The layers are the user's own again, and the device's memory is free."""
        for unit in self._units:
            visit = unit.module.__dict__.pop("forward")
            if visit.before is not None:
                unit.module.forward = visit.before
        for guard in self._guards:
            guard.remove()
        for piece in self.pieces:
            piece.release()
        self._by_storage.clear()

    def _visit(self, number: int, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        unit = self._units[number]
        self._need(number)
        with _hosting(unit.places, self._guests):
            return forward(*args, **kwargs)

    def _need(self, number: int) -> None:
        """Layer `number` is wanted now: it is waited for, the one after it is sent for, the others go."""
        after = self._order.enter(number)
        unit = self._units[number]
        coming = [] if after is None else self._units[after].pieces
        if not self.stay:
            kept = {id(p) for p in (*unit.pieces, *coming, *self._always.pieces)}
            for piece in self.pieces:
                if piece.there is not None and id(piece) not in kept:
                    self._by_storage.pop(_storage(piece.there), None)  # empty ones share a place
                    piece.release()
        self._bring(unit.pieces)
        for piece in coming:
            self._start(piece)

    def _bring(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            self._start(piece)
        for piece in pieces:
            piece.await_()

    def _start(self, piece: Piece) -> None:
        piece.bring()
        assert piece.there is not None
        self._by_storage[_storage(piece.there)] = piece

    def _pack(self, number: int) -> Callable[[torch.Tensor], Any]:
        def pack(tensor: torch.Tensor) -> Any:
            if tensor.layout != torch.strided:
                return tensor
            piece = self._by_storage.get(_storage(tensor))
            if piece is None or tensor.dtype != piece.masters[0].dtype:
                return tensor
            offset = int(tensor.storage_offset())
            return _Parked(number, piece, tensor.size(), tensor.stride(), offset)

        return pack

    def _unpack(self, saved: Any) -> torch.Tensor:
        if not isinstance(saved, _Parked):
            return saved
        if self._order.is_elsewhere(saved.unit):
            self._need(saved.unit)
        if saved.piece.there is None:
            self._bring([saved.piece])
        assert saved.piece.there is not None
        return saved.piece.there.as_strided(saved.size, saved.stride, saved.offset)

    def _made(self, module: nn.Module, direct: set[int]) -> list[Piece]:
        """The pieces: parameters grouped by the layers that use them, by dtype, and whether they train."""
        users: dict[int, list[int]] = {}
        for number, unit in enumerate(self._units):
            for owner, key, p in _places(unit.module):
                unit.places.append((owner, key, p))
                users.setdefault(id(p), []).append(number)
        groups: dict[tuple, list[nn.Parameter]] = {}
        for p in module.parameters():
            found = () if id(p) in direct else tuple(dict.fromkeys(users.get(id(p), ())))
            groups.setdefault((found, p.dtype, p.requires_grad), []).append(p)
        always = {id(p) for (found, *_), ps in groups.items() if not found for p in ps}
        self._always.places = [x for x in _places(module) if id(x[2]) in always]
        for unit in self._units:
            unit.places = [x for x in unit.places if id(x[2]) not in always]
        pieces = []
        for (found, *_), ps in groups.items():
            piece = Piece(ps, self.flow)
            pieces.append(piece)
            self._guests |= dict(zip(ps, piece.guests, strict=True))
            for unit in [self._units[n] for n in found] or [self._always]:
                unit.pieces.append(piece)
        return pieces


class _Outside:
    """Called with a gradient of a parameter at home: not its layer, something else used it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, gradient: torch.Tensor) -> None:
        raise ModelError(
            f"parameter {self._name!r} lives on the host and was used outside of its layer's forward",
            remedy="call the layer itself, or a plan whose stage has no residence",
        )


class _Visit:
    """A layer's forward while its parameters live elsewhere; `before` is what stood in its place, or None."""

    def __init__(
        self, residing: Residing, number: int, forward: Callable[..., Any], before: Callable[..., Any] | None
    ) -> None:
        self._residing, self._number, self._forward, self.before = residing, number, forward, before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._residing.call(self._number, self._forward, *args, **kwargs)


@contextmanager
def _hosting(places: Sequence[Place], guests: dict[nn.Parameter, nn.Parameter]) -> Iterator[None]:
    """Guests stand where the parameters were."""
    try:
        for owner, key, p in places:
            owner._parameters[key] = guests[p]
        _tell_recurrent(places)
        yield
    finally:
        for owner, key, p in places:
            owner._parameters[key] = p
        _tell_recurrent(places)


def _tell_recurrent(places: Sequence[Place]) -> None:
    """torch's recurrent layers keep a list of their parameters beside the parameters."""
    for owner in {id(o): o for o, *_ in places if isinstance(o, nn.RNNBase)}.values():
        owner._flat_weights = [getattr(owner, name) for name in owner._flat_weights_names]


def _places(module: nn.Module) -> list[Place]:
    return [
        (owner, key, p) for owner in module.modules() for key, p in owner._parameters.items() if p is not None
    ]


def _move_buffers(module: nn.Module, device: torch.device) -> None:
    for owner in module.modules():
        for key, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[key] = buffer.to(device)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
