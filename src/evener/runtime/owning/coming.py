"""A unit's values on their way from their owners into its flat buffer."""

import torch
from torch import Tensor

from evener.core.seams import Arriving, Post
from evener.runtime.owning.units import Unit

TAG = 0x20000


class Coming:
    """What `here` asked of the other owners of `unit`; an accelerator's values come by its host."""

    def __init__(self, unit: Unit, flat: Tensor, here: str, post: Post) -> None:
        self._unit, self._post = unit, post
        self._handed_in_s: list[float | None] = [post.now()]
        self._parts: list[tuple[Tensor, Tensor, Arriving]] = []
        for owner in unit.owners():
            if owner != here:
                place = flat[slice(*unit.spans[owner])]
                room = place if flat.device.type == "cpu" else torch.empty(len(place), dtype=unit.dtype)
                self._parts.append((place, room, post.receive(room, owner, TAG + unit.number)))

    def take(self) -> None:
        """Return when all values are in their places."""
        parts, self._parts = self._parts, []
        for _, _, arriving in parts:
            arriving.wait()
            self._handed_in_s.append(arriving.sent_s)
        # What one device owns all of comes from nowhere.
        self._post.reach(self._handed_in_s if parts else (), self._unit.sizes, adds=False)
        with torch.no_grad():
            for place, room, _ in parts:
                if place is not room:
                    place.copy_(room)
