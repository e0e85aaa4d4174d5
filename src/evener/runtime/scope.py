"""What holds for one micro-batch while it is on a device: the keys of its masks, and its place in a wave."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from evener.runtime.batchnorm import Wave
from evener.runtime.dropout import DropoutKeys


@dataclass(kw_only=True)
class Scope:
    """Entered around each forward and backward of one micro-batch; with nothing in it, it does nothing."""

    keys: DropoutKeys | None = None
    wave: Wave | None = None

    def __enter__(self) -> "Scope":
        for part in (self.keys, self.wave):
            if part is not None:
                part.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for part in (self.wave, self.keys):
            if part is not None:
                part.__exit__(*error)

    def pass_by(self, phase: str) -> None:
        """This micro-batch does not count in `phase` ("forward" or "backward"): nobody may wait for it."""
        if self.wave is not None:
            (self.wave.pass_forward if phase == "forward" else self.wave.pass_backward)()


ScopeOf = Callable[[int, int], Scope]


def no_scope(stage: int, micro_batch: int) -> Scope:
    """Nothing depends on which micro-batch it is."""
    return Scope()
