"""What one optimizer step did: the line a run writes after each step, and all that a report is made from."""

from evener.core.figures import Value
from evener.core.trace import CAUSES


class TableRecord(Value, frozen=True, kw_only=True):
    """What lookups of one table asked for on `device`, as counted: `ids`, repeats included, and `rows`.

    A row counts once for each micro-batch. `found_in` has the rows of a tiered table by the memory that had
    them: "hot" (the device), "host" or "file". Example: 200 rows, {"host": 150, "file": 50}: a hit rate of
    75 % in host memory.
    """

    device: str
    ids: int
    rows: int
    found_in: dict[str, int] = {}

    def plus(self, other: "TableRecord") -> "TableRecord":
        """Both together."""
        names = dict.fromkeys((*self.found_in, *other.found_in))
        found = {n: self.found_in.get(n, 0) + other.found_in.get(n, 0) for n in names}
        return TableRecord(
            device=self.device, ids=self.ids + other.ids, rows=self.rows + other.rows, found_in=found
        )

    @property
    def hit_rates(self) -> dict[str, float]:
        """The part of rows that each memory above the file had; empty for a table in one memory."""
        rows = sum(self.found_in.values())
        return {n: x / rows for n, x in self.found_in.items() if n != "file"} if rows else {}


class StepRecord(Value, frozen=True, kw_only=True):
    """One step of the whole job: `step_s` seconds for `samples` samples, and seconds by device and cause.

    `seconds` maps device → cause → seconds within this step; what a device's causes leave of `step_s` counts
    as overhead. `loss` is the mean over the global batch, absent where it was not finite. `skipped` is the
    sentence why the step was not committed (a NaN, no memory), empty for a step that was. `tables` is what
    the leading device looked up, by table.
    Example: StepRecord(step=3, samples=16, step_s=1.0, loss=2.5, seconds={"lab/a": {"compute": 0.9}}) leaves
    0.1 s of lab/a to overhead.
    """

    step: int
    samples: int
    step_s: float
    loss: float | None = None
    lr: float | None = None
    seconds: dict[str, dict[str, float]] = {}
    skipped: str = ""
    tables: dict[str, TableRecord] = {}

    def __post_init__(self) -> None:
        if not 0 < self.step_s < float("inf"):
            raise ValueError(f"step_s of step {self.step} must be positive and finite, got {self.step_s}")
        if self.step < 0 or self.samples < 0:
            raise ValueError(f"step and samples must be 0 or more, got {self.step} and {self.samples}")
        for device, by_cause in self.seconds.items():
            unknown = sorted(set(by_cause) - set(CAUSES))
            if unknown:
                raise ValueError(
                    f"seconds of {device} in step {self.step} name {', '.join(unknown)}; "
                    f"the causes are {', '.join(CAUSES)}"
                )
