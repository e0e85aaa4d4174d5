"""`ev.Pipe` beside the plain Sequential: what comes out, what gradients it gives, and what it refuses.

The devices are the CPU several times over, and "meta", on which tensors have shapes and no values.
"""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import evener as ev
from evener.errors import ModelError, UsageError

CPUS = ["cpu", "cpu"]


def layers(*, dropout: float = 0.0) -> nn.Sequential:
    """Eight layers in float64 with weights from seed 0."""
    torch.manual_seed(0)
    made = [nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.ReLU(inplace=True), nn.Dropout(dropout)]
    return nn.Sequential(*made, nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 3)).double()


def batch(size: int = 10) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    return torch.randn(size, 5, generator=g, dtype=torch.float64), torch.randint(0, 3, (size,), generator=g)


def gradients(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert list(ours) == list(theirs)
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize(
    ("size", "chunks", "balance"),
    [(8, 4, None), (10, 4, [3, 5]), (3, 8, [2, 3, 3]), (1, 1, [8]), (7, 3, [1] * 8), (9, 2, [3, 1, 4])],
)
def test_output_and_gradients_are_those_of_the_sequential(
    size: int, chunks: int, balance: list[int] | None, checkpoint: Any
) -> None:
    plain, (x, y) = layers(), batch(size)
    pipe = ev.Pipe(
        copy.deepcopy(plain), chunks, ["cpu"] * len(balance or CPUS), balance, checkpoint=checkpoint
    )
    torch.testing.assert_close(pipe(x.clone()), plain(x.clone()), rtol=1e-12, atol=1e-14)
    assert_same(gradients(pipe, x, y), gradients(plain, x, y))


def test_an_optimiser_and_a_clip_norm_train_it_like_the_sequential() -> None:
    plain, (x, y) = layers(), batch()
    pipe = ev.Pipe(copy.deepcopy(plain), chunks=3, devices=CPUS)
    for model in (plain, pipe):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(4):
            gradients(model, x, y)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    assert_same(dict(pipe.named_parameters()), dict(plain.named_parameters()))


def test_weights_have_the_users_names_and_go_from_one_to_the_other() -> None:
    named = nn.Sequential()
    named.add_module("embed", nn.Linear(5, 4))
    named.add_module("head", nn.Linear(4, 3))
    pipe = ev.Pipe(named, devices=CPUS)
    assert list(pipe.state_dict()) == list(named.state_dict()) == [
        "embed.weight", "embed.bias", "head.weight", "head.bias",
    ]  # fmt: skip
    other = ev.Pipe(copy.deepcopy(named), devices=CPUS)
    other.load_state_dict({k: torch.ones_like(v) for k, v in pipe.state_dict().items()})
    assert other.embed.weight.sum() == 20 and named.embed is pipe.embed


def test_a_stage_lies_on_its_device_and_the_output_on_the_last() -> None:
    pipe = ev.Pipe(layers(), chunks=2, devices=["cpu", "meta", "cpu", "meta"])
    assert [str(next(pipe[i].parameters()).device) for i in (0, 2, 5, 7)] == ["cpu", "meta", "cpu", "meta"]
    with pytest.raises(NotImplementedError):  # nothing comes back from a device without values
        pipe(batch()[0])
    pipe = ev.Pipe(layers(), chunks=2, devices=["cpu", "meta"], balance=[3, 5])
    assert pipe(batch()[0]).device == torch.device("meta")
    assert (pipe.balance, pipe.chunks) == ([3, 5], 2)


def test_an_input_elsewhere_is_named() -> None:
    pipe = ev.Pipe(layers(), chunks=2, devices=["meta", "cpu"])
    with pytest.raises(UsageError, match=r"the input is on cpu, the first layer is on meta"):
        pipe(batch()[0])


def test_layers_that_already_lie_on_devices_stay_there() -> None:
    """As the tutorials of torch's own Pipe did it: each layer moved, no devices named."""
    module = nn.Sequential(
        nn.Flatten(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3, device="meta"), nn.ReLU()
    )
    pipe = ev.Pipe(module, chunks=8, checkpoint="never")
    assert (pipe.balance, [str(d) for d in pipe.devices]) == ([3, 2], ["cpu", "meta"])
    output = pipe(torch.randn(4, 5)).local_value()
    assert output.shape == (4, 3) and output.device.type == "meta"


class Noting(nn.Module):
    """Notes its name at every run."""

    def __init__(self, name: str, notes: list[str]) -> None:
        super().__init__()
        self.name, self.notes = name, notes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.notes.append(f"{self.name}{int(x[0])}")
        return x.abs()  # which keeps its input for backward


def noting(names: str) -> tuple[nn.Sequential, list[str]]:
    notes: list[str] = []
    return nn.Sequential(*(Noting(name, notes) for name in names)), notes


def test_micro_batches_run_through_the_stages_side_by_side() -> None:
    module, notes = noting("abc")
    ev.Pipe(module, chunks=3, devices=["cpu"] * 3)(torch.arange(3.0))
    assert notes == ["a0", "a1", "b0", "a2", "b1", "c0", "b2", "c1", "c2"]


@pytest.mark.parametrize(("checkpoint", "runs"), [("always", 6), ("except_last", 5), ("never", 3)])
def test_what_is_run_again_in_backward(checkpoint: Any, runs: int) -> None:
    module, notes = noting("a")
    pipe = ev.Pipe(module, chunks=3, devices=["cpu"], checkpoint=checkpoint)
    x = torch.arange(3.0, requires_grad=True)
    pipe(x).sum().backward()
    assert len(notes) == runs
    notes.clear()
    pipe.eval()(x).sum().backward()
    with torch.no_grad():
        pipe.train()(x)
    assert len(notes) == 6


def test_what_is_run_again_drops_the_same_and_moves_no_statistics() -> None:
    found = []
    for checkpoint in ("always", "never"):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3)).double()
        pipe = ev.Pipe(module, chunks=3, devices=CPUS, checkpoint=checkpoint)  # type: ignore[arg-type]
        torch.manual_seed(2)
        found.append(gradients(pipe, *batch()) | dict(pipe.named_buffers()))
    assert_same(*found)
    assert found[0]["1.num_batches_tracked"] == 3


def test_a_first_layer_that_writes_to_its_input_can_be_run_again() -> None:
    class Doubling(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mul_(2).tanh()

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 4), Doubling(), nn.Linear(4, 3)).double()
    pipe = ev.Pipe(copy.deepcopy(plain), chunks=2, devices=CPUS, balance=[1, 2], checkpoint="always")
    assert_same(gradients(pipe, *batch()), gradients(plain, *batch()))


def test_modes_reach_the_layers_and_a_layer_of_its_own_mode_keeps_it() -> None:
    pipe = ev.Pipe(nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5)), chunks=2, devices=CPUS)
    pipe[1].eval()
    pipe(torch.randn(4, 5))
    assert not pipe[1].training and pipe[1].num_batches_tracked == 0
    assert all(not m.training for m in pipe.eval().modules())


def test_tuples_and_dicts_go_through() -> None:
    class Split(nn.Module):
        def forward(self, given: dict) -> tuple[torch.Tensor, dict]:
            return given["x"] * given["factor"], {"y": given["y"]}

    class Join(nn.Module):
        def forward(self, both: tuple[torch.Tensor, dict]) -> dict:
            return {"sum": both[0] + both[1]["y"]}

    x, y = torch.arange(6.0).view(3, 2), torch.ones(3, 2)
    pipe = ev.Pipe(nn.Sequential(Split(), Join()), chunks=2, devices=CPUS)
    assert torch.equal(pipe({"x": x, "y": y, "factor": 3})["sum"], 3 * x + 1)


def test_dtypes_can_be_changed_and_devices_cannot() -> None:
    pipe = ev.Pipe(layers(), devices=["cpu", "meta"]).float()
    assert {p.dtype for p in pipe.parameters()} == {torch.float32}
    pipe = ev.Pipe(layers(), devices=CPUS)
    with pytest.raises((UsageError, NotImplementedError)):
        pipe.to("meta")


def tied() -> nn.Sequential:
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    module[2].weight = module[0].weight
    return module


def test_a_tensor_on_two_devices_is_refused_and_on_one_that_comes_twice_is_not() -> None:
    with pytest.raises(UsageError, match=r"shape \(4, 4\) belongs to layers on cpu and on meta"):
        ev.Pipe(tied(), devices=["cpu", "meta"])
    pipe = ev.Pipe(tied(), devices=["cpu", "meta", "cpu"])
    assert pipe[0].weight is pipe[2].weight


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"module": nn.Linear(2, 2)}, "made from an nn.Sequential, got Linear"),
        ({"module": nn.Sequential()}, "has 0"),
        ({"chunks": 0}, "1 or more, got 0"),
        ({"checkpoint": "sometimes"}, "checkpoint='sometimes'"),
        ({"balance": [4, 3]}, r"balance \[4, 3\] does not place 8 layers on 2 devices"),
        ({"balance": [8, 0]}, r"balance \[8, 0\]"),
        ({"balance": [2, 2, 4]}, r"on 2 devices"),
        ({"devices": None, "balance": [3, 5]}, r"devices= is missing\n.*balance \[3, 5\]: 2 devices"),
        ({"devices": []}, "devices= names no device"),
        ({"devices": ["cpu"] * 9}, "8 layers cannot be placed on 9 devices"),
        ({"devices": ["cpu", "nowhere:3"]}, "no device nowhere:3 here"),
    ],
)
def test_wrong_use_is_told(changed: dict[str, Any], says: str) -> None:
    given = {"module": layers(), "chunks": 2, "devices": CPUS, "balance": None} | changed
    with pytest.raises(UsageError, match=says):
        ev.Pipe(**given)


@pytest.mark.parametrize("named", [{}, {"chunks": 8}])
def test_a_balance_that_comes_second_is_told_where_it_belongs(named: dict[str, Any]) -> None:
    """As torchgpipe has it; with `chunks=8` Python itself would say "multiple values for argument"."""
    with pytest.raises(UsageError, match=r"second argument of a Pipe is chunks.* got \[3, 5\]\n.*balance="):
        ev.Pipe(layers(), [3, 5], **named)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [torch.empty(0, 5), torch.tensor(1.0), (torch.ones(2), torch.ones(3)), 5])
def test_an_input_without_samples_is_told(given: Any) -> None:
    with pytest.raises(UsageError, match="cannot be split by samples"):
        ev.Pipe(layers(), chunks=2, devices=CPUS)(given)


def test_an_output_without_samples_is_told() -> None:
    class Mean(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mean()

    with pytest.raises(ModelError, match="one number for a whole micro-batch"):
        ev.Pipe(nn.Sequential(nn.Tanh(), Mean()), chunks=2, devices=CPUS)(torch.ones(4, 5))


def test_a_layer_that_was_added_later_is_not_left_out() -> None:
    pipe = ev.Pipe(layers(), devices=CPUS)
    pipe.append(nn.Tanh())
    with pytest.raises(UsageError, match="cut for 8 layers and has 9 now"):
        pipe(batch()[0])
