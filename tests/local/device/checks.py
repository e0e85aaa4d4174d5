"""What programs do with a device, a function each: for the rehearsal device, and for real ones in tests/gpu.

Every check raises when the device does not do what the CPU does. `device` is "rehearsal", "cuda", …
"""

from collections.abc import Callable

from tests.local.device.runtime_checks import (
    buckets_leave_without_a_wait,
    groups_connect_when_they_are_made,
    loss_in_host_memory,
    messages_are_pinned_for_devices_alone,
    sums_are_waited_for,
    waits_for_copies,
    waves_are_summed_on_the_host,
)
from tests.local.device.tensor_checks import (
    accelerator_calls,
    changing_in_place,
    choosing,
    factories,
    lanes,
    mixing_raises,
    precisions,
    reading,
    sequences,
    vectors,
)
from tests.local.device.training_checks import (
    attention,
    autograd_in_place,
    clipping,
    convolution,
    copying,
    custom_function,
    data_loader,
    dropping_out,
    embedding,
    errors_in_backward,
    hooks,
    linear_norm,
    loss_scaling,
    losses,
    mixed_precision,
    moving_keeps_identity,
    no_warnings,
    optimizers,
    recomputing,
    recurrent,
    saving,
    second_derivatives,
    state_dicts,
    tied_weights,
    transformer,
)

CHECKS: dict[str, Callable[[str], None]] = {
    f.__name__: f
    for f in (
        factories, reading, mixing_raises, changing_in_place, autograd_in_place, linear_norm, convolution,
        transformer, attention, recurrent, embedding, tied_weights, losses, optimizers, clipping,
        mixed_precision, loss_scaling, recomputing, saving, copying, moving_keeps_identity, hooks,
        errors_in_backward, custom_function, second_derivatives, data_loader, sequences, choosing, precisions,
        dropping_out, state_dicts, vectors, accelerator_calls, no_warnings, lanes,
        loss_in_host_memory, waits_for_copies, sums_are_waited_for, groups_connect_when_they_are_made,
        buckets_leave_without_a_wait, waves_are_summed_on_the_host, messages_are_pinned_for_devices_alone,
    )
}  # fmt: skip
