"""The one loss scale of a job in float16: all devices see the same sums, so all decide alike."""

from evener.core.membership import ScaleState

GROWTH, BACKOFF, PATIENCE = 2.0, 0.5, 2000  # torch.amp.GradScaler's own numbers


class LossScale:
    """The factor on the loss that keeps small float16 gradients from vanishing.

    Halved after a step whose summed gradient is not finite, which does not count; doubled after 2,000 good
    steps on end.
    """

    def __init__(self, value: float, good_steps: int = 0) -> None:
        self.value, self.good_steps = value, good_steps

    @property
    def state(self) -> ScaleState:
        """What goes to checkpoints and to later generations of devices."""
        return ScaleState(value=self.value, good_steps=self.good_steps)

    def restore(self, state: ScaleState) -> None:
        """Go on from `state`."""
        self.value, self.good_steps = state.value, state.good_steps

    def update(self, *, finite: bool) -> None:
        """Take in whether the step's summed gradient was finite."""
        if not finite:
            self.value *= BACKOFF
            self.good_steps = 0
            return
        self.good_steps += 1
        if self.good_steps == PATIENCE:
            self.value *= GROWTH
            self.good_steps = 0
