"""What one device has of a step that was not concluded: its own sums, should others only redo what is lost.

own samples ──► own sum ──┬──► sum over devices ──► tally ──► optimiser
                          └──► kept until then: in no sum with others' yet
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from evener.core.ranges import Ranges
from evener.runtime.tally import Share

RangeOf = Callable[[int, int], tuple[int, int]]
"""Where in the global batch this device's samples of (stage, micro-batch) lie."""


@dataclass(frozen=True, kw_only=True)
class Kept:
    """The gradients of the samples `ranges` of step `number`, summed on this device alone, by parameter.

    `share` is what they put into the tally; `statistics` are BatchNorm's after them.
    """

    number: int
    ranges: Ranges
    gradients: dict[nn.Parameter, torch.Tensor]
    share: Share
    statistics: tuple[torch.Tensor, ...] = ()
