"""Where the parameters of this device's stages live, as the plan says: on the device, or on its host."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from evener.core.plan import Stage
from evener.core.words import some
from evener.errors import UsageError
from evener.runtime.cutting.stage import StageModule
from evener.runtime.parts import Part
from evener.runtime.residing.homes import Homes
from evener.runtime.residing.ondisk import StateOnDisk
from evener.runtime.residing.residing import Residing
from evener.session.layout.seat import Seat
from evener.session.site import Site


def housed(module: nn.Module, stage: Stage, site: Site) -> Residing | None:
    """`module` put where `stage` wants it; with a residence, what brings its parameters to the device.

    They stay the model's own then, on the host.
    """
    if stage.residence is None:
        place = torch.empty(0, device=site.torch_device).device
        if any(t.device != place for t in (*module.parameters(), *module.buffers())):
            module.to(place)  # not again: torch makes parameters of wrapped tensors anew, and their hooks go
        return None
    cut = module if isinstance(module, StageModule) else None
    return Residing(
        module,
        layers_in(cut.held if cut else module, stage.layers),
        site.torch_device,
        stay=stage.residence == "host-optimizer",
        recompute=stage.recompute and stage.residence == "host",
        direct=cut.used_directly if cut else (),
    )


def layers_in(model: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """The modules of layers that run as a whole; what only hangs on the model or a container is none."""
    modules = dict(model.named_modules())
    opened = {n for n in names if any(other.startswith(n + ".") for other in names)}
    return [modules[n] for n in names if n in modules and n not in opened]


def state_on_disk(modules: Sequence[tuple[nn.Module, Stage]], seat: Seat) -> StateOnDisk | None:
    """Where the optimiser's state of those `modules` lies whose stage wants it on disk; None without one."""
    wanted = dict.fromkeys(p for m, stage in modules if stage.state_on_disk for p in m.parameters())
    return StateOnDisk(tuple(wanted), Path(seat.folder), seat.site.driver.on_disk) if wanted else None


def homes_of(parts: Mapping[int, Part], site: Site, state: StateOnDisk | None) -> Homes:
    """Where gradients of `parts` are summed and their parameters stepped on.

    UsageError where stages of one device share a parameter that one of them keeps on the host.
    """
    residing = [(p, p.residing) for p in parts.values() if p.residing is not None]
    for part, one in residing:
        for other in parts.values():
            theirs = set(other.module.parameters()) if other is not part else set()
            tied = [n for n, p in part.module.named_parameters() if p in theirs]
            if tied and (other.residing is None or other.residing.stay != one.stay):
                raise UsageError(
                    f"stages {part.stage} and {other.stage} on {site.device.name} share {some(tied, 3)} "
                    "and keep it in different places",
                    remedy="the same residence for both stages, or another device for one of them",
                )
    return Homes([one for _, one in residing], lambda work: site.driver.on_host(work), state)
