"""What a device holds of a model whose state is in parts, and with whom: all of it, or stages of a cut."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from evener.core.plan import Plan
from evener.core.seams import Wire
from evener.runtime.cutting.stage import StageModule
from evener.runtime.owning.means import Means
from evener.runtime.owning.units import Unit, whole_segment
from evener.runtime.segments import Segment


@dataclass(frozen=True, kw_only=True)
class HeldStages:
    """The plan's segments, this device's stages by number, and its wire among the devices of each segment."""

    segments: Sequence[Segment]
    modules: Mapping[int, nn.Module]
    wires: Mapping[tuple[str, ...], Wire]

    def runners(self, unit: Unit) -> list[nn.Module]:
        """The modules here before whose forward the unit's values must be there."""
        found: dict[nn.Module, None] = {}
        for stage in sorted(unit.stages & self.modules.keys()):
            module = self.modules[stage]
            for layer in unit.layers:
                if isinstance(module, StageModule):
                    found[module.runner_of(layer)] = None
                else:
                    found[dict(module.named_modules()).get(layer, module)] = None
        return list(found)


def whole(model: nn.Module, plan: Plan, means: Means) -> HeldStages:
    """All of `model`, which every device of the plan holds."""
    segment, here = whole_segment(model, plan), means.ranks.here
    stage = next(n for n, _, s in plan.numbered_stages() if here in s.shares[0].devices)
    return HeldStages(segments=(segment,), modules={stage: model}, wires={segment.devices: means.wire})
