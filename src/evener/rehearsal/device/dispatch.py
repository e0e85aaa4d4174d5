"""One operation on the device: unwrap, check that all lies there, compute on the CPU, wrap, charge.

Every operation that torch runs on a rehearsal tensor, or that makes one, comes through `Dispatcher.run`.
"""

from collections.abc import Callable
from typing import Any

import torch

from evener.rehearsal.counting import is_free
from evener.rehearsal.device.card import Card
from evener.rehearsal.device.copies import COPIES
from evener.rehearsal.device.reshaping import RESHAPES, refresh
from evener.rehearsal.device.tensor import NAME, RehearsalTensor

_CPU = torch.device("cpu")
_PLAIN = {int, float, bool, str, type(None), torch.dtype, torch.layout, torch.memory_format, complex}
# The host must know a number or a size before it can go on.
_WAITS = {
    "_local_scalar_dense",
    "equal",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "bincount",
}
_INDEXES = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}

Special = Callable[["Dispatcher", Any, tuple, dict[str, Any]], Any]


class _Op:
    """What is known of an operation before it runs."""

    __slots__ = ("indexes", "is_free", "special", "waits")

    def __init__(self, func: torch._ops.OpOverload) -> None:
        name = func._overloadpacket.__name__
        self.is_free = is_free(func)
        self.waits = name in _WAITS
        self.indexes = name in _INDEXES
        self.special: Special | None = COPIES.get(name) or RESHAPES.get(name)


class Dispatcher:
    """Runs the operations of `card`."""

    def __init__(self, card: Card) -> None:
        self.card = card
        self._ops: dict[Any, _Op] = {}

    def run(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The result of `func` on the device, and its time on the device's clock."""
        card = self.card
        clock = card.clock
        clock.enter()
        try:
            if card.flights:
                card.flights.check()
            card.num_calls += 1
            op = self._ops.get(func) or self.op(func)
            if op.special is not None:
                return op.special(self, func, args, kwargs)
            return self.compute(func, op, args, kwargs)
        finally:
            clock.leave()

    def op(self, func: Any) -> _Op:
        """What is known of `func`."""
        if func not in self._ops:
            self._ops[func] = _Op(func)
        return self._ops[func]

    def compute(self, func: Any, op: _Op, args: tuple, kwargs: dict[str, Any]) -> Any:
        """An operation whose tensors all lie on the device."""
        shells: dict[int, RehearsalTensor] = {}
        wanted = kwargs.get("device")
        stays = wanted is not None and torch.device(wanted).type != NAME
        inner_args = []
        for value in args:
            kind = type(value)
            if kind is RehearsalTensor:  # the common cases of `unwrap`, which is called for the rest
                inner = value.content
                shells[id(inner)] = value
                inner_args.append(inner)
            else:
                inner_args.append(value if kind in _PLAIN else self.unwrap(value, shells, func, op))
        inner_kwargs = {k: self.unwrap(v, shells, func, op) for k, v in kwargs.items()} if kwargs else kwargs
        if kwargs.get("pin_memory") and not stays:
            inner_kwargs["pin_memory"] = False
        out = func(*inner_args, **inner_kwargs)
        if stays:
            return out
        result = self.wrap(out, shells)
        if "out" in kwargs:
            for shell in shells.values():
                if shell.shape != shell.content.shape:
                    refresh(self, shell)
        card = self.card
        if not op.is_free and not card.muted:
            seconds = card.roofline.seconds(func, inner_args, inner_kwargs, out)
            card.clock.queue(seconds * card.factor)
        if op.waits or (op.indexes and _has_mask(inner_args)):
            self.wait_for_stream(4 if op.waits else 8)
        return result

    def wait_for_stream(self, num_bytes: int) -> None:
        """The host waits for what is queued on the current stream, and for a few bytes of it."""
        card = self.card
        card.copied(num_bytes, inwards=False)
        if not card.muted:
            card.clock.wait(card.clock.stream.free_s)

    def unwrap(self, value: Any, shells: dict[int, RehearsalTensor], func: Any, op: _Op) -> Any:
        """The values behind `value`; RuntimeError for a tensor that lies elsewhere."""
        kind = type(value)
        if kind is RehearsalTensor:
            inner = value.content
            shells[id(inner)] = value
            return inner
        if kind in _PLAIN:
            return value
        if kind is list or kind is tuple:
            return [self.unwrap(v, shells, func, op) for v in value]
        if isinstance(value, torch.Tensor):
            if (value.dim() == 0 or op.indexes) and value.device.type == "cpu":
                return value  # as on other accelerators: a number from the host may take part
            raise self.misplaced(value, func)
        if kind is torch.device:
            return _CPU if value.type == NAME else value
        return value

    def misplaced(self, value: torch.Tensor, func: Any) -> RuntimeError:
        """The error of torch for tensors on two devices."""
        return RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{self.card.torch_device} and {value.device}! (a tensor of shape {tuple(value.shape)} in "
            f"{func._schema.name})"
        )

    def wrap(self, out: Any, shells: dict[int, RehearsalTensor]) -> Any:
        """`out` as tensors of the device; what was changed in place is the tensor it was."""
        if type(out) is torch.Tensor:
            known = shells.get(id(out))
            return known if known is not None else self.shell(out)
        if type(out) is list or type(out) is tuple:
            return type(out)([self.wrap(x, shells) for x in out])
        return out

    def shell(self, inner: torch.Tensor) -> RehearsalTensor:
        """A tensor of the device around `inner`, which has or takes its room."""
        if inner.layout is not torch.strided:
            raise NotImplementedError(f"{NAME} devices have no tensors of layout {inner.layout}")
        room = self.card.room(inner.untyped_storage())
        return RehearsalTensor(inner, room, self.card.torch_device)


def _has_mask(args: list[Any]) -> bool:
    return any(isinstance(t, torch.Tensor) and t.dtype in (torch.bool, torch.uint8) for t in args[1])
