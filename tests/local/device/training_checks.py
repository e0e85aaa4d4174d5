"""What programs do with modules on a device and their gradients, a function each: see `checks`."""

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from tests.local.device.comparing import against_cpu, raises, same


def autograd_in_place(device: str) -> None:
    for where in ("cpu", device):
        w = torch.ones(4, device=where, requires_grad=True)
        x = w * 2
        x[1:3].mul_(3)
        x.sum().backward()
        assert w.grad is not None and w.grad.tolist() == [2, 6, 6, 2]


def linear_norm(device: str) -> None:
    make = lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))  # noqa: E731
    against_cpu(device, make, torch.randn(5, 8))


def convolution(device: str) -> None:
    make = lambda: nn.Sequential(  # noqa: E731
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 4, 3)
    )
    against_cpu(device, make, torch.randn(4, 3, 8, 8))


def transformer(device: str) -> None:
    make = lambda: nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)  # noqa: E731
    against_cpu(device, make, torch.randn(3, 5, 16))
    layer = make().to(device).eval()
    with torch.no_grad():
        assert layer(torch.randn(3, 5, 16, device=device)).shape == (3, 5, 16)


def attention(device: str) -> None:
    q, k, v = (torch.randn(2, 2, 5, 8) for _ in range(3))
    mask = torch.rand(2, 1, 5, 5) > 0.3
    mask[..., 0] = True
    for more in ({}, {"is_causal": True}, {"attn_mask": mask}, {"attn_mask": mask.float()}):
        at = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in more.items()}
        found = F.scaled_dot_product_attention(q.to(device), k.to(device), v.to(device), **at)
        same(found, F.scaled_dot_product_attention(q, k, v, **more))
    dropped = F.scaled_dot_product_attention(q.to(device), k.to(device), v.to(device), dropout_p=0.5)
    assert dropped.shape == q.shape


def recurrent(device: str) -> None:
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        against_cpu(
            device, lambda kind=kind: kind(4, 6, num_layers=2, batch_first=True), torch.randn(3, 5, 4)
        )


class _Language(nn.Module):
    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 8)
        self.head = nn.Linear(8, 30, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(x))


def embedding(device: str) -> None:
    against_cpu(device, _Language, torch.randint(0, 30, (4, 6)))


def tied_weights(device: str) -> None:
    model = _Language(tied=True).to(device)
    assert model.head.weight is model.embedding.weight and len(list(model.parameters())) == 1
    against_cpu(device, lambda: _Language(tied=True), torch.randint(0, 30, (4, 6)))
    assert model.to("cpu").head.weight is model.embedding.weight


def losses(device: str) -> None:
    x, y = torch.randn(6, 5), torch.randint(0, 5, (6,))
    same(F.cross_entropy(x.to(device), y.to(device)), F.cross_entropy(x, y))
    y[2] = -100
    same(F.cross_entropy(x.to(device), y.to(device)), F.cross_entropy(x, y))
    same(F.mse_loss(x.to(device), x.to(device) + 1), torch.tensor(1.0))
    target = torch.rand(6, 5)
    same(
        F.binary_cross_entropy_with_logits(x.to(device), target.to(device)),
        F.binary_cross_entropy_with_logits(x, target),
    )


def optimizers(device: str) -> None:
    kinds: list[Callable[..., torch.optim.Optimizer]] = [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.SGD(p, lr=0.1, foreach=True),
        lambda p: torch.optim.Adam(p, lr=0.1),
        lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
        lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
        lambda p: torch.optim.RMSprop(p, lr=0.1),
        lambda p: torch.optim.Adagrad(p, lr=0.1),
    ]
    x = torch.randn(6, 4)
    for kind in kinds:
        torch.manual_seed(1)
        ours = nn.Linear(4, 3)
        theirs = copy.deepcopy(ours).to(device)
        for module, where in ((ours, "cpu"), (theirs, device)):
            optimizer = kind(module.parameters())
            for _ in range(3):
                optimizer.zero_grad()
                module(x.to(where)).square().sum().backward()
                optimizer.step()
        same(theirs.weight, ours.weight)


def clipping(device: str) -> None:
    module = nn.Linear(4, 3).to(device)
    module(torch.randn(6, 4, device=device)).square().sum().backward()
    before = nn.utils.clip_grad_norm_(module.parameters(), 0.1)
    after = torch.cat([p.grad.flatten() for p in module.parameters()]).norm()
    assert before.item() > 0.1 and abs(after.item() - 0.1) < 1e-4


def mixed_precision(device: str) -> None:
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 3))
    theirs = copy.deepcopy(ours).to(device)
    x = torch.randn(5, 8)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = ours(x)
    with torch.autocast(device, torch.bfloat16):
        found = theirs(x.to(device))
        assert (found @ found.T).dtype is torch.bfloat16 and found.float().softmax(-1).dtype is torch.float32
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.detach().cpu().float(), wanted.detach().float(), rtol=0.02, atol=0.02)
    found.float().sum().backward()
    assert theirs[0].weight.grad is not None and theirs[0].weight.grad.dtype is torch.float32


def loss_scaling(device: str) -> None:
    module = nn.Linear(4, 3).to(device)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device, init_scale=16.0)
    loss = module(torch.randn(6, 4, device=device)).square().sum()
    scaler.scale(loss).backward()
    before = module.weight.detach().clone()
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(module.weight, before) and scaler.get_scale() == 16


def recomputing(device: str) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 2)).to(device)
    x = torch.randn(6, 4, device=device)
    gradients = []
    for twice in (False, True):
        module.zero_grad()
        torch.manual_seed(3)
        out = checkpoint(module, x, use_reentrant=False) if twice else module(x)
        out.sum().backward()
        gradients.append(module[0].weight.grad.clone())
    assert torch.equal(*gradients)


def saving(device: str) -> None:
    module = nn.Linear(3, 2).to(device)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.randn(1, 3, device=device)).sum().backward()
    optimizer.step()
    for where in (device, "cpu"):
        file = io.BytesIO()
        torch.save({"model": module.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.seek(0)
        loaded = torch.load(file, map_location=where, weights_only=True)
        assert loaded["model"]["weight"].device.type == where
        same(loaded["model"]["weight"], module.weight.detach().cpu())
    fresh = nn.Linear(3, 2).to(device)
    fresh.load_state_dict(loaded["model"])
    same(fresh.weight, module.weight.detach().cpu())


def copying(device: str) -> None:
    module = nn.Linear(3, 2).to(device)
    twin = copy.deepcopy(module)
    assert isinstance(twin.weight, nn.Parameter) and twin.weight.device.type == device
    twin.weight.data.zero_()
    assert module.weight.abs().sum().item() > 0


def moving_keeps_identity(device: str) -> None:
    module = nn.Linear(3, 2)
    weight = module.weight
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module.to(device)
    assert module.weight is weight and optimizer.param_groups[0]["params"][0] is module.weight
    module(torch.ones(1, 3, device=device)).sum().backward()
    module.to("cpu")
    assert module.weight.device.type == "cpu" and module.weight.grad.device.type == "cpu"


def hooks(device: str) -> None:
    module = nn.Linear(3, 2).to(device)
    seen: list[str] = []
    module.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.device.type))
    module.register_full_backward_hook(lambda *_: seen.append("module"))
    module(torch.ones(1, 3, device=device, requires_grad=True)).sum().backward()
    assert sorted(seen) == sorted([device, "module"])


def errors_in_backward(device: str) -> None:
    module = nn.Linear(3, 2).to(device)

    def stop(parameter: Any) -> None:
        raise ValueError("stop here")

    handle = module.weight.register_post_accumulate_grad_hook(stop)
    for _ in range(3):
        raises(ValueError, "stop here", lambda: module(torch.ones(1, 3, device=device)).sum().backward())
    handle.remove()
    module(torch.ones(1, 3, device=device)).sum().backward()
    raises(
        ValueError,
        "stop here",
        lambda: _Raising.apply(module(torch.ones(1, 3, device=device))).sum().backward(),
    )


class _Raising(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        raise ValueError("stop here")


def custom_function(device: str) -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            return 2 * x * gradients[0]

    x = torch.arange(3.0, device=device, requires_grad=True)
    Double.apply(x).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [0, 2, 4]


def second_derivatives(device: str) -> None:
    x = torch.tensor(3.0, device=device, requires_grad=True)
    (first,) = torch.autograd.grad(x**3, x, create_graph=True)
    (second,) = torch.autograd.grad(first, x)
    assert first.item() == 27 and second.item() == 18


def data_loader(device: str) -> None:
    data = TensorDataset(torch.arange(12.0).reshape(6, 2), torch.arange(6))
    for x, y in DataLoader(data, batch_size=3, pin_memory=True):
        assert x.is_pinned() and not torch.zeros(1).is_pinned()
        assert x.to(device, non_blocking=True).sum().item() == x.sum().item() and y.is_pinned()


def dropping_out(device: str) -> None:
    kept = F.dropout(torch.ones(10_000, device=device), 0.3).count_nonzero().item()
    assert 6_500 < kept < 7_500


def state_dicts(device: str) -> None:
    module = nn.BatchNorm1d(3).to(device)
    module(torch.randn(8, 3, device=device))
    host = nn.BatchNorm1d(3)
    host.load_state_dict(module.state_dict())
    same(module.running_mean, host.running_mean)
    assert module.num_batches_tracked.item() == 1


def no_warnings(device: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.1), nn.Linear(4, 2)).to(device)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(5, 3, device=device)).sum().backward()
            optimizer.step()
