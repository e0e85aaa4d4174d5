"""Models that look into their tensors before the first layer: their forward comes from torch.export."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evener.errors import ModelError
from evener.runtime.cutting import cut, layer_names
from tests.unit.runtime.cutting.families import (
    build,
    distance,
    forward,
    forward_backward,
    gradients,
    split,
)


class Attention(nn.Module):
    """Gives a value and the number of its heads, takes a size."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor, mask: Tensor | None, *, length: int) -> tuple[Tensor, int]:
        scores = x @ x.transpose(1, 2) / length
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None], float("-inf"))
        x = self.linear(scores.softmax(-1) @ x)
        return self.norm(x.transpose(1, 2)).transpose(1, 2), 1


class Peeking(nn.Module):
    """Drops a mask that masks nothing, which only the values can tell."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.blocks = nn.ModuleList(Attention() for _ in range(3))
        self.position = nn.Parameter(torch.randn(12, 4))
        self.register_buffer("table", torch.ones(12, 4))

    def forward(self, ids: Tensor, mask: Tensor) -> dict:
        keep = mask > 0
        if not torch.compiler.is_exporting() and bool(keep.all()):
            keep = None
        length = ids.shape[1]
        x = self.embed(ids) + (self.position + self.table)[:length]
        for block in self.blocks:
            y, heads = block(x, keep, length=length)
            x = F.dropout(x + y * heads, 0.1, self.training)
        return {"logits": F.linear(x, self.embed.weight), "length": length, "none": None}


STAGES = [["(root)", "embed", "blocks.0"], ["blocks.1"], ["blocks.2"]]


def call(samples: int, length: int, *, masked: bool) -> tuple[Tensor, Tensor]:
    mask = torch.ones(samples, length)
    if masked:
        mask[0, length // 2 :] = 0
    return torch.randint(0, 9, (samples, length)), mask


def test_the_branch_that_holds_for_every_value_is_taken() -> None:
    torch.manual_seed(0)
    model = Peeking().double()
    whole = copy.deepcopy(model)
    found = cut(model, STAGES, example=(call(2, 6, masked=False), {}))
    assert found.tracer == "exported"
    assert found.ties == (((0, "embed.weight"), (2, "embed.weight")),)
    for samples, length, masked in ((2, 6, False), (3, 6, True), (5, 11, True), (1, 3, False)):
        args = call(samples, length, masked=masked)
        torch.manual_seed(1)
        got = forward_backward_logits(found, args)
        torch.manual_seed(1)
        wanted = whole(*args)
        wanted["logits"].square().sum().backward()
        assert torch.allclose(got, wanted["logits"], rtol=1e-12, atol=1e-12)
        assert distance(gradients(model), gradients(whole)) <= 1e-12
        assert forward(found, args)["length"] == length
        assert whole.load_state_dict(model.state_dict())  # that forward counted in BatchNorm too


def forward_backward_logits(found, args) -> Tensor:
    class Logits:
        stages, flatten = found.stages, staticmethod(found.flatten)

        @staticmethod
        def unflatten_output(carry):
            return found.unflatten_output(carry)["logits"]

    return forward_backward(Logits, args)


def test_training_and_evaluation_have_steps_of_their_own() -> None:
    model = Peeking().double()
    found = cut(model, STAGES, example=(call(2, 6, masked=True), {}))
    args = call(3, 5, masked=True)
    model.eval()
    for stage in found.stages:
        stage.eval()
    assert torch.equal(forward(found, args)["logits"], forward(found, args)["logits"])
    assert torch.allclose(forward(found, args)["logits"], model(*args)["logits"], rtol=1e-12)


def test_hooks_of_layers_run_once_in_a_stage_and_stay_where_they_were() -> None:
    model = Peeking()
    seen = []
    model.blocks[1].register_forward_hook(lambda *_: seen.append("called"))
    found = cut(model, STAGES, example=(call(2, 6, masked=True), {}))
    seen.clear()
    forward(found, call(2, 6, masked=True))
    assert seen == ["called"]
    assert "forward" not in vars(model.blocks[1])


def test_what_neither_way_can_write_down_says_what_both_made_of_it() -> None:
    class Reads(Peeking):
        def forward(self, ids: Tensor, mask: Tensor) -> dict:
            if bool(mask.sum() > 3):
                ids = ids + 1
            return super().forward(ids % 9, mask)

    with pytest.raises(
        ModelError, match=r"reads a value[^\n]*before the first layer[^\n]*\n.*torch.export: Guard"
    ):
        cut(Reads(), STAGES, example=(call(2, 6, masked=True), {}))


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_hugging_face_models_with_padding(family: str) -> None:
    model, whole = build(family), build(family)
    names = layer_names(model)
    ids, mask = torch.randint(0, 32, (2, 8)), torch.ones(2, 8, dtype=torch.long)
    example = {"input_ids": ids, "attention_mask": mask, "labels": ids}
    found = cut(model, split(names, [2, 4]), example=((), example))
    assert found.tracer == "exported"
    ids, mask = torch.randint(0, 32, (3, 11)), torch.ones(3, 11, dtype=torch.long)
    mask[1, 7:] = 0
    now = {"input_ids": ids, "attention_mask": mask, "labels": ids}
    torch.manual_seed(1)
    got = forward_backward(found, (), now)
    torch.manual_seed(1)
    wanted = whole(**now)
    wanted.logits.square().sum().backward()
    assert torch.allclose(got, wanted.logits, rtol=1e-12, atol=1e-12)
    assert distance(gradients(model), gradients(whole)) <= 1e-12
    assert type(forward(found, (), now)) is type(wanted)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_hugging_face_models_without_padding_keep_their_fast_attention(family: str) -> None:
    """No mask is made, so attention stays the causal kernel that the uncut model uses."""
    model = build(family)
    found = cut(model, split(layer_names(model), [3]), example=((torch.randint(0, 32, (2, 8)),), {}))
    assert found.tracer == "recorded"
    assert any("use_cache=False" in note for note in found.notes)
    floating = [s for s in found.stages[1].takes if s.kind == "tensor" and s.sample_dim == 0]
    assert len(floating) == 1, "one hidden state crosses, and no mask"
