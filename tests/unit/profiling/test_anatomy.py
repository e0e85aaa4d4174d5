import pytest
import torch
import torch.nn.functional as F
from torch import nn

from evener.errors import ModelError
from evener.profiling.anatomy import anatomy
from evener.profiling.chain import chain_of


def mean_square(model, batch):
    return model(batch).square().mean()


def scan(model, batch, step_loss=mean_square):
    return anatomy(model, chain_of(model), step_loss, batch, len(batch))


def test_counts_of_two_linear_layers():
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    found = scan(model, torch.randn(4, 5))
    assert found.order == ["0", "1", "2"]
    assert found.flops == {"0": 2 * 4 * 5 * 7, "1": 0, "2": 2 * 4 * 7 * 3}
    assert found.output_bytes == {"0": 4 * 7 * 4, "1": 4 * 7 * 4, "2": 4 * 3 * 4}
    # the input for the first weight; tanh's output once, though two layers keep it; the loss's own input
    assert found.saved_bytes == {"0": 4 * 5 * 4, "1": 4 * 7 * 4, "": 4 * 3 * 4}


def test_cpu_attention_has_its_flops():
    class Attention(nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(x, x, x)

    batch = torch.randn(2, 3, 16, 8, requires_grad=True)
    found = scan(nn.Sequential(Attention()), batch)
    assert found.flops["0"] == 2 * (2 * 2 * 3 * 16 * 16 * 8)


def test_an_error_names_its_layer():
    class Broken(nn.Module):
        def forward(self, x):
            raise ValueError("no such luck")

    model = nn.Sequential(nn.Linear(5, 5), Broken())
    with pytest.raises(ModelError, match=r"in layer '1': ValueError: no such luck[\s\S]*micro-batch of 4"):
        scan(model, torch.randn(4, 5))
    assert not model[0]._forward_hooks
    assert not model[0]._forward_pre_hooks


def test_an_error_in_the_loss_is_told_apart():
    with pytest.raises(ModelError, match="outside of its layers or in the loss"):
        scan(
            nn.Sequential(nn.Linear(5, 5)),
            torch.randn(4, 5),
            lambda m, b: F.cross_entropy(m(b), b.long()[:1]),
        )


@pytest.mark.parametrize(
    ("step_loss", "message"),
    [
        (lambda m, b: m(b), "must be one number, got shape"),
        (lambda m, b: 3.0, "must be one number, got float"),
        (lambda m, b: m(b).mean().detach(), "does not depend on any parameter"),
    ],
)
def test_a_loss_that_cannot_be_used(step_loss, message):
    with pytest.raises(ModelError, match=message):
        scan(nn.Sequential(nn.Linear(5, 5)), torch.randn(4, 5), step_loss)
