"""What a run's report holds: frozen structures with fixed JSON names, so that others can build on them."""

from evener.core.figures import Figure, Source, Value
from evener.core.trace import CAUSES

LEFT_OUT = "left_out"
LOSS_CAUSES: tuple[str, ...] = (LEFT_OUT, *CAUSES)


class Solo(Value, frozen=True, kw_only=True):
    """What one offered device does alone: `samples_per_s`, and where a sample's time goes then.

    `seconds` holds seconds per sample by cause other than compute; compute is the rest of 1/rate.
    Empty means that the rate is not split: all of it counts as compute.
    Example: rate 8 and {"optimizer": 0.005} leave 0.125 - 0.005 = 0.120 s of compute a sample.
    """

    samples_per_s: Figure
    seconds: dict[str, float] = {}

    def __post_init__(self) -> None:
        unknown = sorted(set(self.seconds) - (set(CAUSES) - {"compute"}))
        if unknown:
            raise ValueError(f"solo seconds name {', '.join(unknown)}; compute is what the others leave")
        if min(self.seconds.values(), default=0.0) < 0 or sum(self.seconds.values()) > self.per_sample_s:
            raise ValueError(
                f"solo seconds {self.seconds} must be positive and at most {self.per_sample_s} s a sample"
            )

    @property
    def per_sample_s(self) -> float:
        """Seconds a sample takes alone."""
        return 1 / self.samples_per_s.value

    def seconds_of(self, samples: float) -> dict[str, float]:
        """Seconds by cause that `samples` samples take alone; they sum to samples ÷ rate."""
        seconds: dict[str, float] = {cause: samples * self.seconds.get(cause, 0.0) for cause in CAUSES}
        seconds["compute"] = samples * (self.per_sample_s - sum(self.seconds.values()))
        return seconds


class Evaluation(Value, frozen=True, kw_only=True):
    """Loss on samples that were not trained on, and figures to read it beside ("unigram entropy": 3.26)."""

    heldout_loss: float
    unit: str = ""
    references: dict[str, float] = {}


class DeviceReport(Value, frozen=True, kw_only=True):
    """One offered device in a typical step.

    `busy` is the part of the step spent in compute and optimizer; `seconds` is the whole step by cause,
    `lost_s` what each cause took beyond what the same samples take alone. A device that the plan leaves
    out has no seconds, loses the whole step to "left_out", and `left_out` is the sentence why. A device that
    cannot do the job alone has no solo rate.
    """

    name: str
    samples_per_step: float
    busy: float
    seconds: dict[str, float]
    lost_s: dict[str, float]
    solo_samples_per_s: Figure | None
    left_out: str = ""


class RunReport(Value, frozen=True, kw_only=True):
    """What a run did, against the sum of its devices. Absent values are null.

    `efficiency` = samples_per_s ÷ ideal_samples_per_s, the sum of the solo rates of all offered devices;
    `efficiency_used` takes the sum over used devices only. `gap_s` = step_s - ideal_step_s is what a step
    takes beyond that ideal, and the values of `lost_s` add up to it. `spread` is relative: half the distance
    between the quartiles of the steps over their median.
    """

    efficiency: float
    efficiency_used: float
    samples_per_s: float
    ideal_samples_per_s: float
    step_s: float
    predicted_step_s: float | None
    loss_first: float | None
    loss_last: float | None
    heldout_loss: float | None
    devices: tuple[DeviceReport, ...]
    global_batch: int
    ideal_step_s: float
    gap_s: float
    lost_s: dict[str, float]
    spread: float
    steps: int
    steps_used: int
    steps_skipped: int
    warmup_steps: int
    prediction_error: float | None = None
    predicted_source: Source | None = None
    evaluation: Evaluation | None = None
    notes: tuple[str, ...] = ()
