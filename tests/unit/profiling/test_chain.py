import torch
from torch import nn

from evener.core.layers import ROOT
from evener.profiling.chain import chain_of, ties


class Residual(nn.Sequential):
    def forward(self, x):
        return x + super().forward(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 5)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(5, 5), nn.Tanh()), Residual(nn.Linear(5, 5))])
        self.heads = nn.ModuleDict({"a": nn.Linear(5, 11, bias=False), "again": self.embed})
        self.heads["a"].weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(3))


def test_containers_are_opened_and_what_hangs_on_the_model_is_a_layer():
    pieces = {p.name: p for p in chain_of(Model())}
    assert list(pieces) == [ROOT, "embed", "blocks.0.0", "blocks.0.1", "blocks.1", "heads.a"]
    assert pieces[ROOT].module is None
    assert [p.shape for p in pieces[ROOT].params] == [(3,)]
    assert pieces["blocks.1"].param_bytes == (25 + 5) * 4  # a container with a forward of its own stays whole


def test_layers_cover_every_parameter():
    model = Model()
    held = {id(p) for piece in chain_of(model) for p in piece.params}
    assert held == {id(p) for p in model.parameters()}


def test_tied_parameters_name_each_other():
    tied = ties(chain_of(Model()))
    assert tied["embed"] == ("heads.a",)
    assert tied["heads.a"] == ("embed",)
    assert tied["blocks.1"] == ()


def test_a_model_without_children_is_one_layer():
    (piece,) = chain_of(nn.Linear(2, 3))
    assert piece.name == ROOT
    assert piece.module is not None
    assert piece.param_bytes == 9 * 4
