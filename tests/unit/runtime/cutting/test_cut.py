"""What a cut carries, holds, ties and remembers."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evener.runtime.cutting import cut, layer_names, legal_cuts
from examples.text import ByteTransformer
from tests.unit.runtime.cutting.families import (
    Residual,
    UNet,
    batch,
    build,
    distance,
    forward,
    forward_backward,
    gradients,
    halves,
    split,
)


def test_k10_four_layers_and_one_over_micro_batches_of_unequal_size() -> None:
    model, whole = build("plain"), build("plain")
    found = cut(
        model,
        [["0.0", "0.1", "1.0", "1.1", "2.0", "2.1", "3.0", "3.1"], ["4"]],
        example=((batch("plain", 3),), {}),
    )
    for samples, sizes in ((8, (3, 3, 2)), (6, (3, 3))):
        x = batch("plain", samples)
        for part in x.split(sizes):
            forward_backward(found, (part,))
        whole(x).square().sum().backward()
        assert distance(gradients(model), gradients(whole)) <= 1e-12


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 5)
        self.middle = nn.Linear(5, 5)

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.middle(torch.tanh(self.embed(ids))), self.embed.weight)


class TwoModules(Functional):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.middle(torch.tanh(self.embed(ids))))


@pytest.mark.parametrize(("kind", "second"), [(Functional, "embed.weight"), (TwoModules, "head.weight")])
def test_k11_one_matrix_two_holders(kind, second: str) -> None:
    torch.manual_seed(1)
    model = kind().double()
    whole = copy.deepcopy(model)
    last = ["middle", "head"] if kind is TwoModules else ["middle"]
    ids = torch.randint(0, 11, (3, 4))
    found = cut(model, [["embed"], last], example=((ids,), {}))
    assert found.ties == (((0, "embed.weight"), (1, second)),)
    assert found.stages[0].named["embed.weight"] is found.stages[1].named[second] is model.embed.weight
    optimizers = [torch.optim.Adam(m.parameters(), 0.1) for m in (model, whole)]
    for _ in range(5):
        forward_backward(found, (ids,))
        whole(ids).square().sum().backward()
        assert distance(gradients(model), gradients(whole)) <= 1e-12
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(found.stages[1].named[second], whole.embed.weight)


def test_layers_and_parameters_are_the_models_own_under_its_own_names() -> None:
    model = build("residual")
    found = cut(model, halves(model), example=((batch("residual", 2),), {}))
    named = {name: t for stage in found.stages for name, t in stage.named.items()}
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert named.keys() == own.keys() and all(named[n] is own[n] for n in own)


def test_the_model_is_left_as_it_was() -> None:
    model = build("residual")
    model.blocks[1].eval()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    modes = [m.training for m in model.modules()]
    torch.manual_seed(5)
    drawn = torch.rand(1)
    torch.manual_seed(5)
    cut(model, halves(model), example=((batch_without_drawing(),), {}))
    assert torch.equal(torch.rand(1), drawn)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert [m.training for m in model.modules()] == modes
    assert all(p.grad is None for p in model.parameters())


def batch_without_drawing() -> Tensor:
    return torch.linspace(-1, 1, 2 * 3 * 8 * 8, dtype=torch.float64).reshape(2, 3, 8, 8)


def test_the_cut_lies_where_the_fewest_bytes_cross() -> None:
    model = ByteTransformer()
    example = (torch.zeros(2, 8, dtype=torch.long),), {}
    found = cut(model, split(layer_names(model), [3]), example=example)
    (slot,) = found.stages[1].takes  # the sum of three, not three addends
    assert (slot.kind, slot.sample_dim, slot.per_sample, slot.num_bytes) == ("tensor", 0, 1, 2 * 8 * 64 * 4)


def test_attention_and_feed_forward_of_a_block_may_part() -> None:
    model = ByteTransformer().double()
    nn.init.normal_(model.blocks[0].out.weight)
    nn.init.normal_(model.blocks[0].down.weight)
    nn.init.normal_(model.head.weight)
    whole = copy.deepcopy(model)
    block = "blocks.0."
    first = ["(root)", "embed", "embed_before", block + "norm_attention", block + "qkv", block + "out"]
    second = [block + "norm_mlp", block + "up", block + "down", "blocks.1", "norm", "head"]
    text = torch.randint(0, 256, (2, 8))
    found = cut(model, [first, second], example=((text,), {}))
    assert len(found.stages[1].takes) == 1
    forward_backward(found, (text,))
    whole(text).square().sum().backward()
    assert distance(gradients(model), gradients(whole)) <= 1e-12


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((4,), 0.5))
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.scale * self.a(x)
        return x + self.scale * self.b(x)


def test_a_name_beside_names_below_it_means_what_hangs_on_it() -> None:
    model = nn.Sequential(Scaled(), nn.Linear(4, 2)).double()
    found = cut(model, [["0", "0.a"], ["0.b", "1"]], example=((torch.randn(2, 4).double(),), {}))
    assert found.ties == (((0, "0.scale"), (1, "0.scale")),)
    assert set(found.stages[0].named) == {"0.scale", "0.a.weight", "0.a.bias"}


def test_skips_are_carried_over_several_cuts_and_sizes_weigh_nothing() -> None:
    stages = [["down1"], ["down2"], ["middle"], ["up2"], ["up1"]]
    found = cut(UNet(), stages, example=((torch.randn(2, 3, 8, 8),), {}))
    at_middle = found.stages[2].gives
    assert [s.kind for s in at_middle].count("tensor") == 3
    assert all(s.num_bytes == 0 for s in at_middle if s.kind == "size")
    assert all(s.sample_dim == 0 for s in at_middle if s.kind == "tensor")
    carry = found.flatten((torch.randn(4, 3, 8, 8),), {})
    for stage in found.stages[:3]:
        carry = stage(carry)
    assert [tuple(t.shape) for t, s in zip(carry, at_middle, strict=True) if s.kind == "size"] == [
        (8, 0), (8, 0), (4, 0), (4, 0),
    ]  # fmt: skip


def test_one_activation_used_everywhere_runs_in_every_stage() -> None:
    model = Residual()
    names = (
        "stem",
        "relu",
        "blocks.0.0",
        "blocks.0.1",
        "blocks.1.0",
        "blocks.1.1",
        "blocks.2.0",
        "blocks.2.1",
    )
    found = cut(model, split((*names, "head"), [4]), example=((torch.randn(2, 3, 8, 8),), {}))
    assert found.ties == () and found.notes == ()


class WritesLater(nn.Module):
    """What the first layer gives is written to in place by the second stage, and read after that."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        y = self.b(2 * h)
        h += y
        return self.c(3 * h) + h


def test_a_value_written_in_place_after_its_cut_is_copied_with_a_note() -> None:
    torch.manual_seed(2)
    model = WritesLater().double()
    whole = copy.deepcopy(model)
    x = torch.randn(3, 4).double()
    found = cut(model, [["a"], ["b"], ["c"]], example=((x,), {}))
    assert any("writes in place" in note and "works on a copy" in note for note in found.notes)
    output = forward_backward(found, (x,))
    wanted = whole(x)
    wanted.square().sum().backward()
    assert torch.equal(output, wanted) and distance(gradients(model), gradients(whole)) <= 1e-12


class Rich(nn.Module):
    """Constants, sizes, a mask that needs no gradient, a frozen first layer, a nested output."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.register_buffer("weights", torch.arange(3.0), persistent=False)
        self.unregistered = torch.ones(3)

    def forward(self, x: Tensor, *, scale: float = 1.0, mask: Tensor | None = None):
        with torch.no_grad():
            h = self.a(x)
        h = F.dropout(h * self.weights + self.unregistered, 0.5, self.training)
        if mask is not None:
            h = h * mask
        return {"y": self.b(h) * scale, "sizes": (x.size(0), x.shape[0] * 2), "none": None, "frozen": [h]}


def test_calls_and_outputs_keep_their_structure() -> None:
    model = Rich()
    example = (torch.randn(2, 3),), {"scale": 2.0, "mask": torch.ones(2, 1)}
    found = cut(model, [["(root)", "a"], ["b"]], example=example)
    for mode in (True, False):
        model.train(mode)
        for stage in found.stages:
            stage.train(mode)
        x, mask = torch.randn(5, 3), torch.rand(5, 1)
        torch.manual_seed(0)
        wanted = model(x, scale=2.0, mask=mask)
        torch.manual_seed(0)
        got = forward(found, (x,), {"scale": 2.0, "mask": mask})
        assert got.keys() == wanted.keys() and got["sizes"] == (5, 10) and got["none"] is None
        assert torch.equal(got["y"], wanted["y"]) and torch.equal(got["frozen"][0], wanted["frozen"][0])
    got["y"].sum().backward()
    assert model.a.weight.grad is None and model.b.weight.grad is not None
    assert all("unregistered" not in name for stage in found.stages for name in stage.named)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.a, self.b = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        far = torch.arange(length, device=ids.device)[None] - torch.arange(length, device=ids.device)[:, None]
        mask = torch.where(far > 0, float("-inf"), 0.0)
        x = self.embed(ids)
        for layer in (self.a, self.b):
            x = layer((x @ x.transpose(1, 2) + mask).softmax(-1) @ x)
        return x


def test_what_follows_from_sizes_is_computed_again_and_not_sent() -> None:
    model = Masked()
    found = cut(model, [["embed", "a"], ["b"]], example=((torch.randint(0, 9, (2, 16)),), {}))
    assert [s.kind for s in found.stages[1].takes].count("tensor") == 1
    ids = torch.randint(0, 9, (3, 5))
    assert torch.equal(forward(found, (ids,)), model(ids))


def test_stages_move_copy_and_pickle_like_modules() -> None:
    model = build("bytes")
    text = batch("bytes", 2)
    found = cut(model, halves(model), example=((text,), {}))
    for stage in found.stages:
        stage.eval()
        assert not any(m.training for m in stage.modules())
    carry = found.flatten((text,), {})
    twin = copy.deepcopy(found.stages[0])
    again = pickle.loads(pickle.dumps(found.stages[0]))
    wanted = found.stages[0](carry)
    for other in (twin, again):
        assert all(torch.equal(a, b) for a, b in zip(other(carry), wanted, strict=True))
        assert not any(t is found.stages[0].named[n] for n, t in other.named.items())
    twin.float()
    assert {t.dtype for t in twin(carry) if t.is_floating_point()} == {torch.float32}


def test_everything_may_be_on_the_meta_device() -> None:
    model = build("unet").to("meta")
    found = cut(model, halves(model), example=((batch("unet", 2).to("meta"),), {}))
    assert any("by shape only" in note for note in found.notes)
    assert forward(found, (batch("unet", 5).to("meta"),)).shape[0] == 5


def test_legal_cuts_come_in_the_order_of_the_run() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.body, self.stem = nn.Linear(2, 2), nn.Linear(8, 2), nn.Linear(2, 8)

        def forward(self, x):
            return self.head(self.body(self.stem(x)))

    points = legal_cuts(Backwards(), example=((torch.randn(3, 2),), {}))
    assert [(p.after, p.before, p.legal, p.num_bytes) for p in points] == [
        ("stem", "body", True, 3 * 8 * 4),
        ("body", "head", True, 3 * 2 * 4),
    ]
