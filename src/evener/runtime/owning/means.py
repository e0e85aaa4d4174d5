"""How a device reaches the others that hold state in parts."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from evener.core.seams import Post, Wire
from evener.runtime.ranks import Ranks


@dataclass(frozen=True, kw_only=True)
class Means:
    """How a device reaches the others: parcels of state, sums of small numbers, and its own clock."""

    ranks: Ranks
    post: Post
    wire: Wire
    device: torch.device
    now: Callable[[], float]
