import random

import numpy as np
import pytest
import torch
from torch import nn

from evener.errors import DataError, ModelError, UsageError
from evener.profiling import profile_model
from tests.unit.profiling.fakes import ScriptedDriver

LAYER_S = {"0": 0.3e-3, "1": 0.1e-3, "2": 0.6e-3}
LOSS_S = 0.2e-3
WITH_LOSS_S = LAYER_S | {"2": LAYER_S["2"] + LOSS_S}


def cost(action, signature):
    """A whole step takes 1 ms + 1 ms a sample forward and twice that backward; layers and loss as listed."""
    if action == "INPUT":
        return 0.2e-3
    if action == "STEP":
        return 5e-3 if signature[0] == "update" else 0.5e-3
    factor = 1 if action == "0F0" else 2
    if signature[0] == "layer":
        return factor * LAYER_S[signature[1]] * signature[2]
    if signature[0] == "loss":
        return factor * LOSS_S * signature[1]
    return factor * 1e-3 * (1 + signature[1])


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def profiled(model=None, *, driver=None, **given):
    arguments = {
        "model": model or small(),
        "step_loss": lambda m, batch: m(batch).square().mean(),
        "optimizer": lambda params: torch.optim.AdamW(params, lr=0.1),
        "batch_of": lambda n: torch.randn(n, 5),
        "kind": "thing",
        "driver": driver or ScriptedDriver(cost),
        "micro_batches": (1, 2, 4),
    }
    return profile_model(**{**arguments, **given})


def test_whole_steps_are_what_the_driver_says():
    profile = profiled()
    assert [s.micro_batch for s in profile.steps] == [1, 2, 4]
    for step in profile.steps:
        assert step.fits
        assert step.forward_s.value == pytest.approx(1e-3 * (1 + step.micro_batch))
        assert step.backward_s.value == pytest.approx(2e-3 * (1 + step.micro_batch))
        assert step.update_s.value == pytest.approx(5e-3)
        assert step.input_s.value == pytest.approx(0.2e-3)
        assert step.forward_s.spread == pytest.approx(0, abs=1e-9)
    assert profile.kinds == ("thing",)


def test_layers_and_their_timings():
    profile = profiled()
    assert [x.name for x in profile.layers] == ["0", "1", "2"]
    first = profile.layers[0]
    assert (first.num_params, first.param_bytes) == (42, 168)
    assert (first.output_bytes_per_sample, first.saved_bytes_per_sample) == (28, 20)
    assert first.flops_per_sample == 70
    assert len(profile.timings) == 9
    for timing in profile.timings:
        assert timing.forward_s.value == pytest.approx(WITH_LOSS_S[timing.layer] * timing.micro_batch)
        assert timing.backward_s.value == pytest.approx(2 * WITH_LOSS_S[timing.layer] * timing.micro_batch)
        assert (timing.update_s is None) == (timing.layer == "1")  # tanh has nothing to update
    assert profile.gradient_bytes == (42 + 24) * 4
    assert profile.state_bytes == 2 * (42 + 24) * 4 + 4 * 4  # two moments and four step counts
    assert profile.dtype == "float32"


def test_actions_are_those_of_the_executor():
    driver = ScriptedDriver(cost)
    profiled(driver=driver)
    assert {action for action, _ in driver.actions} == {"INPUT", "0F0", "0B0", "STEP"}


def test_peak_bytes_are_the_sum_of_what_a_step_holds():
    profile = profiled()
    params = (42 + 24) * 4
    saved_and_output = (20 + 28 + 12) + 28
    for step in profile.steps:
        assert step.peak_bytes.value == 2 * params + profile.state_bytes + step.micro_batch * saved_and_output


class Noisy(nn.Module):
    """Parameters, running statistics, dropout, and an in-place layer after a shared one."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.norm = nn.BatchNorm1d(6)
        self.shared = nn.Linear(6, 6)
        self.relu = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.5)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x):
        x = self.norm(self.first(x))
        return self.drop(self.relu(self.shared(self.shared(x)))) * self.scale


def test_everything_is_left_as_it_was():
    torch.manual_seed(3)
    model = Noisy()
    model.first.weight.grad = kept = torch.ones(6, 5)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    pointers = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()

    def batch_of(n):
        random.random()
        np.random.rand()
        return torch.randn(n, 5)

    profiled(model, batch_of=batch_of, micro_batches=(2, 4))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
        assert tensor.data_ptr() == pointers[name], name
    assert model.first.weight.grad is kept
    assert model.norm.weight.grad is None
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.array_equal(np.random.get_state()[1], states[2])
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def by_name(action, signature):
    return 1e-3 if signature[:1] == ("layer",) else cost(action, signature)


def test_a_layer_called_twice_works_in_place_or_only_holds_parameters():
    profile = profiled(Noisy(), driver=ScriptedDriver(by_name), micro_batches=(2, 4))
    names = [x.name for x in profile.layers]
    assert names == ["(root)", "first", "norm", "shared", "relu", "drop"]
    assert profile.layers[3].flops_per_sample == 2 * 2 * 6 * 6
    timed = {t.layer for t in profile.timings if t.forward_s and t.backward_s}
    assert timed == set(names) - {"(root)"}


def test_a_size_the_model_refuses_is_left_out_and_said():
    profile = profiled(Noisy(), driver=ScriptedDriver(by_name))
    assert [s.micro_batch for s in profile.steps] == [2, 4]
    assert "size 1 left out: the model failed in layer 'norm': ValueError" in profile.note


def test_a_model_that_fails_everywhere_is_an_error():
    with pytest.raises(ModelError, match="failed in layer '0': RuntimeError"):
        profiled(batch_of=lambda n: torch.randn(n, 6))


def test_a_model_that_fails_in_backward():
    class Wall(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            raise ArithmeticError("no way back")

    with pytest.raises(ModelError, match="failed in backward: ArithmeticError: no way back"):
        profiled(step_loss=lambda m, b: Wall.apply(m(b)).mean())


def test_a_size_predicted_not_to_fit_is_a_result():
    profile = profiled(memory_bytes=1_300)
    assert [(s.micro_batch, s.fits) for s in profile.steps] == [(1, True), (2, True), (4, False)]
    assert profile.steps[2].forward_s is None
    assert "no room for 4 samples: " in profile.note


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("Tried to allocate 2 GiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
    ],
)
def test_running_out_of_memory_is_a_result(error):
    class Greedy(nn.Module):
        def forward(self, x):
            if len(x) > 2:
                raise error
            return x

    profile = profiled(
        nn.Sequential(nn.Linear(5, 3), Greedy()), micro_batches=(1, 2, 4, 8), driver=ScriptedDriver(by_name)
    )
    assert [s.micro_batch for s in profile.steps if s.fits] == [1, 2]
    assert [s.micro_batch for s in profile.steps if not s.fits] == [4, 8]
    assert {t.micro_batch for t in profile.timings} == {1, 2}


def test_no_size_fits():
    profile = profiled(memory_bytes=10)
    assert [s.fits for s in profile.steps] == [False, False, False]


def test_an_optimizer_that_does_not_fit_with_the_whole_model_is_measured_by_layer():
    """Three layers of 60, 36 and 96 bytes: state of more than 60 bytes of parameters does not fit."""

    class Large(torch.optim.Adam):
        def step(self, closure=None):
            if sum(p.nbytes for group in self.param_groups for p in group["params"]) > 60:
                raise torch.OutOfMemoryError("Tried to allocate 2 GiB")
            return super().step(closure)

    model = nn.Sequential(nn.Linear(5, 2), nn.Linear(2, 3), nn.Linear(3, 6))
    profile = profiled(model, driver=ScriptedDriver(by_name), optimizer=Large, micro_batches=(1, 2))
    assert [s.fits for s in profile.steps] == [False, False]
    assert {t.layer for t in profile.timings if t.update_s} == {"0", "1"}
    assert "the optimiser of 2 does not fit" in profile.note
    # Of 48 and 36 bytes: twice as many, and a count of steps of 4 bytes for each of 4 tensors.
    assert profile.state_bytes == round((2 * 84 + 16) * (84 + 96) / 84)
    assert "beside 47% of the parameters" in profile.note
    assert all(p.grad is None for p in model.parameters())


def test_what_the_budget_cuts_is_said():
    whole = sum(3e-3 * (1 + n) for n in (1, 2, 4))
    profile = profiled(budget_s=10 * whole, micro_batches=(1, 2, 4, 64))
    assert [s.micro_batch for s in profile.steps] == [1, 2, 4]
    assert "no time for sizes 64" in profile.note
    spent = ScriptedDriver(cost)
    profiled(driver=spent, budget_s=1.0, micro_batches=tuple(2**k for k in range(12)))
    assert spent.now() - 100.0 <= 1.0


def test_an_unsteady_device_is_asked_again_and_shows_its_spread():
    noise = random.Random(1)
    profile = profiled(driver=ScriptedDriver(lambda *a: cost(*a) * noise.uniform(1, 1.2)), micro_batches=(4,))
    (step,) = profile.steps
    assert 5e-3 < step.forward_s.value < 6e-3
    assert 0.01 < step.forward_s.spread < 0.1


def test_a_batch_that_cannot_be_read():
    with pytest.raises(DataError, match="a batch of 1 sample failed: IndexError"):
        profiled(batch_of=lambda n: [][n])


def test_sizes_must_be_positive():
    with pytest.raises(UsageError, match="1 or more"):
        profiled(micro_batches=(0, 2))


def test_frozen_parameters_send_no_gradient():
    model = small()
    model[0].requires_grad_(False)
    profile = profiled(model)
    assert profile.gradient_bytes == 24 * 4
    first = next(t for t in profile.timings if t.layer == "0")
    assert first.forward_s
    assert first.backward_s is None


def test_a_device_too_small_for_the_model_has_its_layers_measured_one_by_one():
    whole = profiled(driver=ScriptedDriver(by_name), micro_batches=(1, 2))
    # 66 parameters with gradients and moments are 1,056 bytes; the first layer alone is 672 and its samples.
    small = profiled(driver=ScriptedDriver(by_name), micro_batches=(1, 2), memory_bytes=1000)
    assert [s.fits for s in small.steps] == [False, False]
    assert small.state_bytes == whole.state_bytes
    key = lambda t: (t.layer, t.micro_batch, t.forward_s, t.backward_s, t.update_s)  # noqa: E731
    assert [key(t) for t in small.timings] == [key(t) for t in whole.timings]


def test_sizes_at_which_a_layer_does_not_fit_are_not_measured():
    small = profiled(driver=ScriptedDriver(by_name), micro_batches=(1, 2), memory_bytes=10)
    assert small.timings == ()


def test_a_loss_that_asks_the_model_for_more_than_its_output_is_not_timed_and_said():
    def step_loss(model, batch):
        return model(batch).square().mean() + 0 * sum(p.sum() for p in model.parameters())

    profile = profiled(step_loss=step_loss)
    assert "the loss is not timed, it does not run alone: AttributeError" in profile.note
    last = next(t for t in profile.timings if t.layer == "2" and t.micro_batch == 1)
    assert last.forward_s.value == pytest.approx(LAYER_S["2"])


def test_buffers_that_training_changes_are_named_and_put_back():
    class Counting(nn.Sequential):
        def forward(self, x):
            self.seen += len(x)
            self.mean.data.lerp_(x.mean(), 0.1)  # past the tensor's own count of changes
            return super().forward(x)

    model = Counting(*small(), nn.BatchNorm1d(3))
    every_third = torch.arange(10.0)[::3]
    held = (
        ("seen", torch.tensor(0)),
        ("mean", torch.zeros(())),
        ("mask", torch.tensor(float("nan"))),
        ("one", every_third[1:2]),  # of one value and another stride, of which torch shows no bytes
    )
    for name, tensor in held:
        model.register_buffer(name, tensor)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    profile = profiled(model, micro_batches=(2, 4))
    assert profile.moving_buffers == ("seen", "mean")
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items() if n != "mask")
