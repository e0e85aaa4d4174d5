"""Whatever is held in whichever parts, a step is that of one device."""

from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, example, given, note, settings
from hypothesis import strategies as st

from tests.owning import Job, Tied, chain, in_parts, on_one
from tests.reference import relative_error

GRADIENT = {torch.float32: 1e-6, torch.float64: 1e-12}
OPTIMIZERS = {
    "adamw": partial(torch.optim.AdamW, lr=1e-2),
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-2),
    "adagrad": partial(torch.optim.Adagrad, lr=1e-2, initial_accumulator_value=0.1),
    "adafactor": partial(torch.optim.Adafactor, lr=1e-2),
    "foreach": partial(torch.optim.Adam, lr=1e-2, foreach=True),
}

shares = st.tuples(st.integers(0, 7), st.integers(1, 4))


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    devices = draw(st.integers(2, 4))
    parts = draw(st.lists(st.integers(0, 5), min_size=devices, max_size=devices).filter(any))
    micro_batches = draw(
        st.lists(shares, min_size=devices, max_size=devices).filter(lambda x: any(n for n, _ in x))
    )
    return Job(
        parts=tuple(parts),
        micro_batches=tuple(micro_batches),
        held=draw(st.sampled_from(["optimizer", "gradients", "parameters"])),
        optimizer=OPTIMIZERS[draw(st.sampled_from(sorted(OPTIMIZERS)))],
        dtype=draw(st.sampled_from([torch.float32, torch.float64])),
        max_norm=draw(st.sampled_from([None, 0.1])),
        loss_scale=draw(st.sampled_from([None, 1024.0])),
        make_model=draw(st.sampled_from([chain, Tied])),
        unit_bytes=draw(st.sampled_from([1, 300, 2**23])),
        seed=draw(st.integers(0, 99)),
        steps=2,
    )


FIVE_THREE_TWO = Job(
    parts=(5, 3, 2),
    micro_batches=((8, 4), (0, 1), (3, 2)),
    held="parameters",
    make_model=Tied,
    dtype=torch.float64,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@example(job=FIVE_THREE_TWO)
@given(job=jobs())
def test_a_step_in_any_parts_is_that_of_one_device(job: Job) -> None:
    want = on_one(job)
    names = [n for n, _ in job.model().named_parameters()]
    limit = GRADIENT[job.dtype]
    for seen in in_parts(job):
        gradients = [seen.gradients[0].get(n) for n in names]
        error = relative_error(gradients, want.gradients[0])
        moved = relative_error(seen.parameters, want.parameters)
        note(f"gradient {error:.1e}, parameters {moved:.1e}")
        assert error <= limit
        assert moved <= (1e-10 if job.dtype is torch.float64 else 1e-3)
        assert seen.results[0].totals.loss == pytest.approx(want.losses[0], rel=limit)
        norm = seen.results[0].gradient_norm
        assert norm is None or norm == pytest.approx(want.norms[0], rel=10 * limit)
