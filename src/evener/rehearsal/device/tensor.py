"""A tensor of the device: a shell that torch takes for device memory, around the real values on the CPU."""

from collections.abc import Callable
from typing import Any
from weakref import ref

import torch

from evener.rehearsal.device.memory import Block

NAME = "rehearsal"
_WIDE = 2**62  # a shell's own storage holds nothing, and must not stand in the way when its sizes change


class Room:
    """A block of the device's memory that the tensors sharing a storage hold; the last one frees it.

    Freed by this object and not by the tensors: torch may bring a tensor back after its finaliser has run.
    """

    __slots__ = ("__weakref__", "_address", "_free", "_take", "block")

    def __init__(
        self, address: int, num_bytes: int, take: Callable[[int], Block], free: Callable[[Block], None]
    ) -> None:
        self.block: Block | None = take(num_bytes)
        self._address, self._take, self._free = address, take, free
        _rooms[address] = ref(self)

    def resize(self, num_bytes: int) -> None:
        """Hold another block for so many bytes; none for 0."""
        block, self.block = self.block, None
        if block is not None:
            self._free(block)
        if num_bytes:
            self.block = self._take(num_bytes)

    def __del__(self) -> None:
        if _rooms.pop(getattr(self, "_address", 0), None) and self.block is not None:
            self._free(self.block)


class Storage:
    """The storage of a tensor on the device: all that torch's own has, and `resize_` moves its room too."""

    def __init__(self, inner: torch.UntypedStorage, room: Room | None) -> None:
        self._inner, self._room = inner, room

    def resize_(self, num_bytes: int) -> "Storage":
        if self._room is not None:
            self._room.resize(num_bytes)
        self._inner.resize_(num_bytes)
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


_rooms: dict[int, ref[Room]] = {}


def room_at(address: int) -> Room | None:
    """The room of the storage at `address`, if that is on the device."""
    found = _rooms.get(address)
    return found() if found is not None else None


class RehearsalTensor(torch.Tensor):
    """`content` has the values; `room` is what it takes of the device's memory."""

    content: torch.Tensor
    room: Room | None
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    dispatch: Callable[..., Any]
    """Set by `backend`: what an operation on such tensors does."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor, room: Room | None, device: torch.device) -> "RehearsalTensor":
        shell = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=device,
            storage_size=_WIDE,
        )
        shell.content, shell.room = inner, room
        return shell

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        return cls.dispatch(func, args, kwargs or {})

    @property
    def data(self) -> torch.Tensor:
        """The same memory outside of any graph; setting it makes this tensor share another's memory."""
        return self.detach()

    @data.setter
    def data(self, other: torch.Tensor) -> None:
        if not isinstance(other, RehearsalTensor) or other.dtype is not self.dtype:
            raise RuntimeError(
                "Attempted to call `variable.set_data(tensor)`, but `variable` and `tensor` have "
                f"incompatible tensor type: {self.device} {self.dtype} and {other.device} {other.dtype}"
            )
        self.content = other.content.detach()
        # As on any device this is no change in place: what autograd has kept of it stays good.
        with torch.autograd._unsafe_preserve_version_counter(self):
            self.resize_shell()

    def resize_shell(self) -> None:
        """Give the shell the sizes, strides and room of the values behind it."""
        inner = self.content
        self.room = room_at(inner.untyped_storage()._cdata)
        # Through the meta key as_strided_ changes the shell's sizes alone.
        key = torch._C.DispatchKeySet
        include = torch._C._dispatch_tls_local_include_set() | key(torch._C.DispatchKey.Meta)
        exclude = torch._C._dispatch_tls_local_exclude_set() | key(torch._C.DispatchKey.Python)
        with torch._C._ForceDispatchKeyGuard(include, exclude), torch._C._AutoDispatchBelowAutograd():
            torch.ops.aten.as_strided_.default(self, inner.size(), inner.stride(), inner.storage_offset())

    def untyped_storage(self) -> Any:
        """The storage with the values: tensors that share memory on the device share it."""
        return Storage(self.content.untyped_storage(), self.room)

    def data_ptr(self) -> int:
        """The address of the values, as unequal for unequal tensors as on a real device."""
        return self.content.data_ptr()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if force:
            return self.detach().cpu().numpy()
        raise TypeError(
            f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to copy the tensor "
            "to host memory first."
        )

    def __array__(self, dtype: Any = None) -> Any:
        return self.numpy()

    def is_pinned(self, device: Any = None) -> bool:
        return False

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        text = repr(self.detach().cpu())
        return f"{text[:-1]}, device='{self.device}'{', requires_grad=True' if self.requires_grad else ''})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at "
                "the moment"
            )
        if id(self) in memo:
            return memo[id(self)]
        copy = self.detach().clone().requires_grad_(self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            copy = torch.nn.Parameter(copy, self.requires_grad)
        if self.grad is not None:
            copy.grad = self.grad.__deepcopy__(memo)
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = (self.detach().cpu(), self.dtype, str(self.device), self.requires_grad)
        return torch._utils._rebuild_device_tensor_from_cpu_tensor, state
