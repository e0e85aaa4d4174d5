"""What programs do with tensors on a device and with its calls, a function each: see `checks`."""

import torch
from torch import nn
from torch.nn import functional as F

from evener.runtime.tables.transfers import Lanes
from tests.local.device.comparing import raises, same


def factories(device: str) -> None:
    for made in (
        torch.zeros(3, 2, device=device),
        torch.ones(3, device=device),
        torch.full((2,), 7.0, device=device),
        torch.arange(5, device=device),
        torch.randn(3, device=device),
        torch.randint(0, 9, (4,), device=device),
        torch.eye(3, device=device),
        torch.linspace(0, 1, 5, device=device),
        torch.tensor([1.0, 2.0], device=device),
        torch.empty(2, 2, device=device),
        torch.zeros(3).to(device),
        torch.zeros_like(torch.zeros(3, device=device)),
        torch.zeros(3, device=device).new_ones(2),
        torch.randperm(5, device=device),
        torch.tril(torch.ones(3, 3, device=device)),
    ):
        assert made.device.type == device and made.device.index == 0
    assert torch.zeros(3, device=device).new_zeros(2, device="cpu").device.type == "cpu"
    assert torch.zeros(2, device=device).to("meta").device.type == "meta"


def reading(device: str) -> None:
    x = torch.arange(4.0, device=device)
    assert x.sum().item() == 6 and x.tolist() == [0, 1, 2, 3] and float(x[1]) == 1 and bool(x[2] > 1)
    assert x.cpu().numpy().tolist() == [0, 1, 2, 3]
    assert f"device='{device}:0'" in repr(x) and "2." in repr(x)
    raises(TypeError, "to host memory first", x.numpy)


def mixing_raises(device: str) -> None:
    x, y = torch.ones(3, 3, device=device), torch.ones(3, 3)
    for work in (
        lambda: x + y,
        lambda: y + x,
        lambda: x @ y,
        lambda: torch.cat([x, y]),
        lambda: F.linear(x, y),
        lambda: x.add_(y),
        lambda: F.cross_entropy(x, torch.tensor([0, 1, 2])),
        lambda: F.embedding(torch.tensor([1]), x),
        lambda: torch.where(x > 0, x, y),
    ):
        raises(RuntimeError, "same device", work)
    same(x + torch.tensor(2.0), torch.full((3, 3), 3.0))  # a number from the host may take part


def changing_in_place(device: str) -> None:
    x = torch.arange(6.0, device=device)
    y = x.view(2, 3)
    y[0].add_(10)
    same(x, torch.tensor([10.0, 11, 12, 3, 4, 5]))
    y[:, 1] = 0
    same(x, torch.tensor([10.0, 0, 12, 3, 0, 5]))
    y[y > 11] = -1
    same(x, torch.tensor([10.0, 0, -1, 3, 0, 5]))
    y.t_()
    assert y.shape == (3, 2) and y.stride() == (1, 3)
    z = torch.ones(1, 3, device=device)
    z.squeeze_()
    z.unsqueeze_(1)
    assert z.shape == (3, 1)
    w = torch.zeros(3, device=device)
    w.data = torch.ones(5, device=device)
    assert w.shape == (5,) and w.sum().item() == 5
    w.set_(torch.full((7,), 2.0, device=device))
    assert w.shape == (7,) and w.sum().item() == 14
    w.resize_(2)
    assert w.shape == (2,)
    torch.add(x, x, out=x)
    assert x[0].item() == 20


def sequences(device: str) -> None:
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(2, 2)]).to(device)
    padded, lengths = nn.utils.rnn.pad_packed_sequence(packed, batch_first=True)
    assert padded.device.type == device and lengths.tolist() == [3, 2]


def choosing(device: str) -> None:
    x = torch.tensor([[3.0, 1.0, 2.0], [0.0, 5.0, 4.0]])
    y = x.to(device)
    same(y.topk(2).values, x.topk(2).values)
    same(y.argmax(1), x.argmax(1))
    same(y.sort(1).values, x.sort(1).values)
    same(y[y > 1], x[x > 1])
    same(y.nonzero(), x.nonzero())
    same(torch.gather(y, 1, torch.tensor([[0], [1]]).to(device)), torch.tensor([[3.0], [5.0]]))
    same(y.index_select(0, torch.tensor([1], device=device)), x[1:])
    same(y[torch.tensor([1])], x[1:])
    same(
        torch.scatter_add(y, 0, torch.tensor([[0, 0, 0]]).to(device), y[1:]),
        x + torch.stack([x[1], x[1] * 0]),
    )
    same(torch.einsum("ij,kj->ik", y, y), torch.einsum("ij,kj->ik", x, x))
    same(torch.stack(y.unbind(1)), torch.stack(x.unbind(1)))
    same(y.repeat(2, 1).flip(0), x.repeat(2, 1).flip(0))
    same(torch.nn.functional.one_hot(y.argmax(1), 3), torch.nn.functional.one_hot(x.argmax(1), 3))


def precisions(device: str) -> None:
    for dtype in (
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.uint8,
        torch.bool,
    ):
        x = torch.ones(3, device=device).to(dtype)
        assert x.dtype is dtype and x.device.type == device
    assert torch.ones(2, device=device).double().sum().item() == 2


def vectors(device: str) -> None:
    module = nn.Linear(3, 2).to(device)
    flat = nn.utils.parameters_to_vector(module.parameters())
    nn.utils.vector_to_parameters(flat * 0, module.parameters())
    assert module.weight.abs().sum().item() == 0
    views = torch.zeros(8, device=device)
    module.weight.grad = views[:6].view(2, 3)
    module.bias.grad = views[6:]
    module(torch.ones(1, 3, device=device)).sum().backward()
    assert views.sum().item() == 8 and module.weight.grad.data_ptr() == views.data_ptr()


def accelerator_calls(device: str) -> None:
    assert torch.accelerator.is_available() and torch.accelerator.current_accelerator().type == device
    assert torch.accelerator.device_count() >= 1 and torch.accelerator.current_device_index() == 0
    torch.accelerator.set_device_index(0)
    torch.accelerator.synchronize()
    torch.accelerator.synchronize(torch.device(device, 0))
    before = torch.accelerator.memory_allocated()
    x = torch.zeros(1000, 1000, device=device)
    assert torch.accelerator.memory_allocated() - before == 4_000_256
    assert torch.accelerator.max_memory_allocated() >= 4_000_000
    assert torch.accelerator.memory_reserved() >= 20 * 2**20
    del x
    assert torch.accelerator.memory_allocated() == before
    torch.accelerator.reset_peak_memory_stats()
    assert torch.accelerator.max_memory_allocated() == before
    stats = torch.accelerator.memory_stats()
    assert stats["allocated_bytes.all.current"] == before
    torch.accelerator.empty_cache()
    free, total = torch.accelerator.get_memory_info()
    assert 0 < free <= total


def lanes(device: str) -> None:
    """Several tensors in one copy inwards, one outwards, beside what the device computes."""
    both = Lanes(torch.device(device))
    ids, rows = torch.arange(7), torch.randn(7, 3)
    there_ids, there_rows = both.sent([ids, rows])
    both.inwards.record_event().synchronize()
    same(there_ids, ids)
    same(there_rows, rows)
    leaving = both.outgoing(there_rows.index_select(0, torch.searchsorted(there_ids, there_ids)) * 2)
    torch.testing.assert_close(leaving.wait(), rows * 2)
    assert both.sent([]) == []
