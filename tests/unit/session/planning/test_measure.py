"""Measuring a model that a device cannot even load."""

import pytest
import torch
from torch import nn

from evener.core.fleet import Device
from evener.errors import OutOfMemoryError
from evener.runtime.hardware import HardwareDriver
from evener.session.planning.measure import profile_here
from evener.session.recipe import Recipe
from evener.session.site import Site


class Full(nn.Linear):
    """A layer that finds the device's memory full."""

    def to(self, *args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def test_a_device_that_cannot_hold_the_parameters_is_named_with_what_would_work() -> None:
    recipe = Recipe(
        model=Full(64, 64),
        dataset=[(torch.zeros(64), torch.zeros(64))],
        loss=nn.MSELoss(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        global_batch=1,
    )
    cpu = torch.device("cpu")
    site = Site(Device(name="lab/gpu0", kind="small"), cpu, HardwareDriver(cpu))
    with pytest.raises(OutOfMemoryError, match=r"lab/gpu0 cannot hold(.|\n)*--plan"):
        profile_here(recipe, site, (1,), 1.0)
