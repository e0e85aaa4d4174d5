"""What stands in a model in the place of nn.Embedding and nn.EmbeddingBag while its table lies elsewhere."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from evener.errors import ModelError, UnknownNameError
from evener.runtime.tables.lookup import bags_of, look_up, sorted_ids, sum_bags
from evener.runtime.tables.rows import MemoryRows, StandInRows, check_dtype
from evener.runtime.tables.table import Part, Table, check_ids
from evener.runtime.tables.transfers import Lanes

# The rows that lookups of a forward gave, as leaves: a backward in two parts must be told what to reach.
LOOKUPS: ContextVar[list[Tensor] | None] = ContextVar("lookups", default=None)


@contextmanager
def noted_lookups(into: list[Tensor]) -> Iterator[None]:
    """Lookups inside add the rows that they give to `into`."""
    token = LOOKUPS.set(into)
    try:
        yield
    finally:
        LOOKUPS.reset(token)


class Sent(Protocol):
    """Rows of `ids` on the device, sent there ahead of the lookup."""

    ids: Tensor
    rows: Tensor
    unused: Tensor | None

    def places(self, input: Tensor) -> Tensor:
        """Where among the rows those of `input` are."""
        ...

    def check(self) -> None:
        """ModelError if the lookup wanted others; `unused` is then known."""
        ...


class TableLayer(nn.Module):
    """A lookup in a table: the same results and gradients as the layer it replaces, which it keeps.

    It has no parameters: whoever reads `weight` is told so, instead of getting a tensor that does not train.
    """

    def __init__(self, table: Table, replaced: nn.Embedding | nn.EmbeddingBag) -> None:
        super().__init__()
        self.table = table
        self.num_embeddings, self.embedding_dim = replaced.num_embeddings, replaced.embedding_dim
        self.padding_idx = replaced.padding_idx
        self._replaced = (replaced,)  # out of nn.Module's sight, which would take it for a child
        self.watcher: Any = None  # told every call's ids; the layer then gives zeros
        self.sent: Sent | None = None  # the rows of the micro-batch under way where they were sent ahead
        self.lanes: Lanes | None = None  # by which gradients leave while the device goes on

    @property
    def replaced(self) -> nn.Embedding | nn.EmbeddingBag:
        """The layer as the user made it."""
        return self._replaced[0]

    @property
    def weight(self) -> Tensor:
        raise ModelError(
            f"the model reads {self.table.name}.weight, and its table is placed elsewhere",
            remedy="leave this table out of place={...}: only layers that look up rows can be placed",
        )

    def host_ids(self, ids: Tensor, offsets: Tensor | None = None) -> Tensor:
        """The ids in the host's memory, after a look at them."""
        host = ids.detach().to("cpu")
        self.table.ids_asked += host.numel()
        check_ids(host, self.table.name, self.num_embeddings, offsets)
        return host

    def rows_of(self, unique: Tensor, device: torch.device) -> Tensor:
        """The rows of `unique` ids on `device`: a leaf whose gradient comes back to the table."""
        return self._leaf(moved(self.table.read(unique), device), lambda g: self.hand_in(unique, g))

    def sent_to(self, device: torch.device) -> Sent | None:
        """What was sent ahead to `device` for the micro-batch under way, its rows as `rows_of` gives them."""
        sent = self.sent
        if sent is None or sent.rows.device != device:
            return None
        if torch.is_grad_enabled() and not sent.rows.requires_grad:
            sent.rows = self._leaf(sent.rows, lambda g: self.hand_in(sent.ids, g, sent))
        return sent

    def _leaf(self, rows: Tensor, hand_in: Callable[[Tensor], None]) -> Tensor:
        rows = rows.detach()
        if torch.is_grad_enabled():
            rows.requires_grad_(True)

            def take(leaf: Tensor) -> None:
                gradient, leaf.grad = leaf.grad, None
                assert gradient is not None
                hand_in(gradient)

            rows.register_post_accumulate_grad_hook(take)
            rows.evener_hand_in = hand_in  # type: ignore[attr-defined]
            noted = LOOKUPS.get()
            if noted is not None:
                noted.append(rows)
        return rows

    def hand_in(self, ids: Tensor, gradient: Tensor, sent: Sent | None = None) -> None:
        """Gradient rows of one lookup; the padding row has none, as it is not trained."""
        dropped = None
        if self.padding_idx is not None:
            dropped = ids == self.padding_idx
        if sent is not None:
            sent.rows = sent.rows.detach()  # the leaf's hook has `sent`: a circle that nobody would find
            sent.check()
            if sent.unused is not None:
                dropped = sent.unused if dropped is None else dropped | sent.unused
        leaving = self.lanes.outgoing(gradient) if self.lanes and gradient.device.type != "cpu" else None
        self.table.collect(ids, leaving or gradient.detach(), dropped)

    def _padding_place(self, unique: Tensor) -> int | None:
        if self.padding_idx is None:
            return None
        where = int(torch.searchsorted(unique, self.padding_idx))
        return where if where < len(unique) and int(unique[where]) == self.padding_idx else None

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, table={self.table.name!r}"


class TableEmbedding(TableLayer):
    """The stand-in of an nn.Embedding."""

    def forward(self, input: Tensor) -> Tensor:
        """Rows of `input`'s ids: shape (*ids, dim)."""
        if self.watcher is not None:
            self.watcher(self, input)
            return torch.zeros(*input.shape, self.embedding_dim, dtype=self.table.dtype, device=input.device)
        sent = self.sent_to(input.device)
        if sent is not None:
            return F.embedding(sent.places(input), sent.rows)
        ids = sorted_ids(self.host_ids(input))
        rows = self.rows_of(ids.unique, input.device)
        if input.device.type == "cpu":
            return look_up(rows, ids).view(*input.shape, self.embedding_dim)
        return F.embedding(moved(ids.places, input.device).view(input.shape), rows)


class TableBag(TableLayer):
    """The stand-in of an nn.EmbeddingBag: sums, means or maxima of bags of rows."""

    def forward(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """(bags, dim) for ids (bags, n), or for flat ids with the offsets at which bags begin."""
        bag, device = self.replaced, input.device
        assert isinstance(bag, nn.EmbeddingBag)
        num = input.shape[0] if offsets is None else offsets.shape[0] - int(bag.include_last_offset)
        if self.watcher is not None:
            self.watcher(self, input)
            return torch.zeros(num, self.embedding_dim, dtype=self.table.dtype, device=device)
        sent = self.sent_to(device)
        if sent is not None:
            return self._bags(sent.places(input), sent.rows, sent.ids, offsets, per_sample_weights)
        starts = None if offsets is None else offsets.to("cpu")
        host = self.host_ids(input, starts)
        weighted = per_sample_weights is not None and per_sample_weights.requires_grad
        if device.type == "cpu" and bag.mode != "max" and not weighted:
            flat, bags = bags_of(
                host, starts, bag.mode, per_sample_weights, self.padding_idx, last=bag.include_last_offset
            )
            ids = sorted_ids(flat)
            return sum_bags(self.rows_of(ids.unique, device), ids, bags)
        ids = sorted_ids(host)
        rows = self.rows_of(ids.unique, device)
        if not len(rows):  # torch wants a row to look up in, also for empty bags alone
            return rows.new_zeros(num, self.embedding_dim)
        places = moved(ids.places, device).view(input.shape)
        return self._bags(places, rows, ids.unique, offsets, per_sample_weights)

    def _bags(
        self, places: Tensor, rows: Tensor, unique: Tensor, offsets: Tensor | None, factors: Tensor | None
    ) -> Tensor:
        bag = self.replaced
        assert isinstance(bag, nn.EmbeddingBag)
        return F.embedding_bag(
            places,
            rows,
            offsets,
            mode=bag.mode,
            per_sample_weights=factors,
            include_last_offset=bag.include_last_offset,
            padding_idx=self._padding_place(unique),
        )


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host's on `device`, on its way beside what the device does."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def place_table(model: nn.Module, name: str) -> TableLayer:
    """Put a stand-in in the place of the layer `name`; its table is the layer's own weight, in host memory.

    A layer on the meta device has no weight yet: until its rows are made, few rows stand for all of them.
    ModelError for a layer whose table cannot be placed, UnknownNameError for none.
    """
    layers = dict(model.named_modules(remove_duplicate=False))
    layer = layers.get(name)
    if layer is None:
        known = [n for n, m in layers.items() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
        raise UnknownNameError(
            f"the model has no layer {name!r} to place", remedy=f"one of: {', '.join(known) or 'no table'}"
        )
    if not isinstance(layer, nn.Embedding | nn.EmbeddingBag):
        raise ModelError(
            f"{name} is a {type(layer).__name__} and no table",
            remedy="place nn.Embedding and nn.EmbeddingBag layers",
        )
    _check_placeable(model, name, layer)
    weight = layer.weight.detach()
    num_rows, dim = weight.shape
    rows = MemoryRows(weight.cpu()) if not weight.is_meta else StandInRows(num_rows, dim, weight.dtype)
    table = Table(name, num_rows, dim, Part(0, num_rows, rows))
    kind = TableEmbedding if isinstance(layer, nn.Embedding) else TableBag
    made = kind(table, layer).train(layer.training)
    _put(model, layer, made)
    return made


def _check_placeable(model: nn.Module, name: str, layer: nn.Embedding | nn.EmbeddingBag) -> None:
    check_dtype(layer.weight.dtype)
    if layer.max_norm is not None or layer.scale_grad_by_freq:
        what = "max_norm" if layer.max_norm is not None else "scale_grad_by_freq"
        raise ModelError(
            f"the table {name} has {what}, whose result depends on how a batch is split",
            remedy=f"build it without {what}",
        )
    own = f"{name}.weight"
    others = [n for n, p in model.named_parameters(remove_duplicate=False) if p is layer.weight and n != own]
    shared = [n for n in others if _layer_of(model, n) is not layer]
    if shared:
        raise ModelError(
            f"the table {name} shares its weight with {', '.join(shared)}",
            remedy="leave it out of place={...}, or untie the weights",
        )


def _layer_of(model: nn.Module, parameter: str) -> nn.Module:
    return model.get_submodule(parameter.rpartition(".")[0])


def _put(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    for module in list(model.modules()):
        for key, child in module._modules.items():
            if child is old:
                module._modules[key] = new


def put_back(model: nn.Module, layer: TableLayer, weight: Tensor | None) -> None:
    """Put the user's own layer back, with `weight` copied into it where there is one."""
    original = layer.replaced
    if weight is not None:
        with torch.no_grad():
            if original.weight.is_meta:
                original.weight = nn.Parameter(weight, requires_grad=original.weight.requires_grad)
            elif original.weight.data_ptr() != weight.data_ptr():
                original.weight.copy_(weight)
    original.train(layer.training)
    _put(model, layer, original)


def table_layers(model: nn.Module) -> list[TableLayer]:
    """The stand-ins of `model`, in the order of their definition."""
    return [m for m in model.modules() if isinstance(m, TableLayer)]
