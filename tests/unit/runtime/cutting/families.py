"""Models of several families with an example each, and stages run as a pipeline would run them."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evener.runtime.cutting import Cut, layer_names
from examples.text import ByteTransformer


class Residual(nn.Module):
    """Convolutions with BatchNorm, one activation for all of them that works in place, in-place additions."""

    def __init__(self, width: int = 4, num_blocks: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width))
            for _ in range(num_blocks)
        )
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.stem(x))
        for block in self.blocks:
            y = block(x)
            y += x
            x = self.relu(y)
        return self.head(x.mean((2, 3)))


class UNet(nn.Module):
    """Two skips over the middle; sizes of early values are needed late."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 6, 3, padding=1)
        self.middle = nn.Conv2d(6, 6, 3, padding=1)
        self.up2, self.up1 = nn.Conv2d(12, 4, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        a = F.relu(self.down1(x))
        b = F.relu(self.down2(F.max_pool2d(a, 2)))
        middle = self.middle(F.max_pool2d(b, 2))
        u = self.up2(torch.cat([F.interpolate(middle, size=b.shape[-2:]), b], 1))
        return self.up1(torch.cat([F.interpolate(u, size=a.shape[-2:]), a], 1))


class TiedBytes(nn.Module):
    """Bytes in and out through one matrix, read by the last line as a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.body = ByteTransformer()
        self.embed = nn.Embedding(256, 64)
        self.position = nn.Parameter(0.02 * torch.randn(64, 64))
        self.blocks, self.norm = self.body.blocks, self.body.norm
        del self.body
        for p in self.blocks.parameters():
            nn.init.normal_(p, std=0.2)

    def forward(self, text: Tensor) -> Tensor:
        x = F.dropout(self.embed(text) + self.position[: text.shape[1]], 0.1, self.training)
        return F.linear(self.norm(self.blocks(x)), self.embed.weight)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 5)
        self.first = nn.LSTM(5, 6, batch_first=True)
        self.second = nn.LSTM(6, 6, num_layers=2, batch_first=True, dropout=0.2)
        self.head = nn.Linear(12, 2)

    def forward(self, ids: Tensor) -> Tensor:
        x, (h, _) = self.first(self.embed(ids))
        x, _ = self.second(x)
        return self.head(torch.cat([x[:, -1], h[-1]], 1))


def plain() -> nn.Module:
    """The model of K10: four linear layers with tanh, and a head."""
    blocks = [nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*blocks, nn.Linear(5, 3))


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.GPT2Config(
        n_layer=3, n_embd=16, n_head=2, vocab_size=32, n_positions=32, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.LlamaConfig(
        num_hidden_layers=3,
        hidden_size=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=32,
        vocab_size=32,
    )
    return transformers.LlamaForCausalLM(config)


FAMILIES = {
    "plain": plain,
    "bytes": TiedBytes,
    "residual": Residual,
    "unet": UNet,
    "lstm": Recurrent,
    "gpt2": gpt2,
    "llama": llama,
}


def build(family: str) -> nn.Module:
    torch.manual_seed(7)
    return FAMILIES[family]().double()


def batch(family: str, samples: int, *, length: int = 8) -> Tensor:
    if family == "plain":
        return torch.randn(samples, 5, dtype=torch.float64)
    if family in ("residual", "unet"):
        return torch.randn(samples, 3, length, length, dtype=torch.float64)
    return torch.randint(0, 11, (samples, length))


def first_tensor(output: object) -> Tensor:
    return output if isinstance(output, Tensor) else output.logits  # type: ignore[attr-defined]


def split(names: tuple[str, ...], cuts: list[int]) -> list[list[str]]:
    edges = [0, *sorted(cuts), len(names)]
    return [list(names[a:b]) for a, b in itertools.pairwise(edges)]


def halves(model: nn.Module) -> list[list[str]]:
    names = layer_names(model)
    return split(names, [len(names) // 2])


def forward(cut: Cut, args: tuple, kwargs: dict | None = None) -> object:
    carry = cut.flatten(args, kwargs or {})
    for stage in cut.stages:
        carry = stage(carry)
    return cut.unflatten_output(carry)


def forward_backward(cut: Cut, args: tuple, kwargs: dict | None = None) -> Tensor:
    """One micro-batch through stages that share nothing but what they send: gradients land in `.grad`.

    Each carry is copied into new leaves, as a receive does; the loss is Σ output².
    """
    carry = cut.flatten(args, kwargs or {})
    given, gave = [], []
    for stage in cut.stages:
        given.append(tuple(t.detach().clone().requires_grad_(t.requires_grad) for t in carry))
        gave.append(stage(given[-1]))
        carry = gave[-1]
    output = first_tensor(cut.unflatten_output(gave[-1]))
    output.square().sum().backward()
    for received, sent in zip(reversed(given[1:]), reversed(gave[:-1]), strict=True):
        pairs = [(s, r.grad) for s, r in zip(sent, received, strict=True) if r.grad is not None]
        torch.autograd.backward([s for s, _ in pairs], [g for _, g in pairs])
    return output.detach()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """‖a − b‖ / ‖b‖ over all of them; names must be the same."""
    assert a.keys() == b.keys()
    away = sum(float((a[n] - b[n]).square().sum()) for n in b)
    whole = sum(float(b[n].square().sum()) for n in b)
    return (away / whole) ** 0.5
