"""Names of layers, and lists of them that do not fit the model."""

import pytest
import torch
from torch import nn

from evener.errors import PlanMismatchError, UnknownNameError
from evener.runtime.cutting import layer_names
from evener.runtime.cutting.layers import layout_of
from examples.text import ByteTransformer
from tests.unit.runtime.cutting.families import gpt2


def test_containers_are_opened_and_other_children_are_layers() -> None:
    names = layer_names(ByteTransformer())
    assert names == ("(root)", "embed", "embed_before", "blocks.0", "blocks.1", "norm", "head")


def test_nested_containers_are_opened_to_the_ground() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), nn.ModuleDict({"out": nn.Linear(2, 2)}))
    assert layer_names(model) == ("0.0", "0.1", "1.out")


def test_a_module_under_two_names_is_one_layer() -> None:
    shared = nn.Linear(2, 2)
    assert layer_names(nn.Sequential(shared, nn.Tanh(), shared)) == ("0", "1")


def test_a_sequential_that_does_more_than_run_its_children_stays_whole() -> None:
    class Skipping(nn.Sequential):
        def forward(self, x):
            return x + super().forward(x)

    assert layer_names(nn.Sequential(Skipping(nn.Linear(2, 2)), nn.Tanh())) == ("0", "1")


def test_hugging_face_wrappers_are_opened_down_to_their_blocks() -> None:
    names = layer_names(gpt2())
    assert names[0] == "transformer.wte" and names[-1] == "lm_head"
    assert [n for n in names if ".h." in n] == [f"transformer.h.{i}" for i in range(3)]


def three() -> nn.Module:
    model = nn.Module()
    model.a, model.b, model.c = nn.Linear(2, 2), nn.Linear(2, 2), nn.BatchNorm1d(2)
    return model


@pytest.mark.parametrize(
    ("stages", "error", "words"),
    [
        ([], PlanMismatchError, ["at least one stage"]),
        ([["a"], [], ["b", "c"]], PlanMismatchError, ["stage 1 is empty", "3 stages", "a, b, c"]),
        ([["a", "b"], ["b", "c"]], PlanMismatchError, ["'b' is named twice", "stages 0 and 1"]),
        ([["a"], ["b"]], PlanMismatchError, ["no stage holds c", "5 parameters and buffers", "c.weight"]),
        ([["a"], ["b", "d"]], UnknownNameError, ["no layer 'd'", "layers are a, b, c"]),
        ([["a"], ["b", ""]], UnknownNameError, ["no layer ''"]),
    ],
)
def test_lists_that_do_not_fit(stages, error, words) -> None:
    with pytest.raises(error) as e:
        layout_of(three(), stages)
    assert all(word in str(e.value) for word in words), str(e.value)


def test_the_second_name_of_a_layer_is_the_same_layer() -> None:
    model = three()
    model.again = model.a
    with pytest.raises(PlanMismatchError, match=r"'again' \(another name of 'a'\) is named twice"):
        layout_of(model, [["a", "b"], ["again", "c"]])


def test_tied_weights_are_placed_by_one_of_their_layers() -> None:
    model = three()
    model.b.weight = model.a.weight
    assert layout_of(model, [["a", "c"], ["b"]]).stage_of == {"a": 0, "c": 0, "b": 1}


def test_tensors_of_the_model_itself_need_a_place() -> None:
    model = three()
    model.register_buffer("scale", torch.ones(2))
    with pytest.raises(PlanMismatchError, match=r"no stage holds \(root\)"):
        layout_of(model, [["a"], ["b", "c"]])
    layout_of(model, [["(root)", "a"], ["b", "c"]])


def test_a_list_of_layers_is_no_layer() -> None:
    model = nn.Module()
    model.blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    with pytest.raises(PlanMismatchError, match=r"'blocks' is a list.*\n.*blocks.0, blocks.1"):
        layout_of(model, [["blocks"]])
