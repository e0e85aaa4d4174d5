"""What the page shows, as one value: the JSON document that its script draws.

Every number carries the text that is shown, the value behind it, its unit and where it comes from.
"""

import msgspec


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the document's parts; unlike a file's values they are written with all their fields."""


class Stat(Part, frozen=True, kw_only=True):
    """One figure at the top: `text` and `unit` are shown large, `source` and `note` small below."""

    key: str
    label: str
    text: str
    unit: str = ""
    source: str = ""
    note: str = ""
    value: float | None = None


class Column(Part, frozen=True, kw_only=True):
    """A column's title and the unit of its numbers; numeric columns stand to the right."""

    title: str
    unit: str = ""
    numeric: bool = False


class Cell(Part, frozen=True, kw_only=True):
    """One cell: the text and, for a number, the value behind it in SI units."""

    text: str
    value: float | None = None


class Table(Part, frozen=True, kw_only=True):
    """Rows under columns; `total` marks the last row as the sum of the others."""

    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    total: bool = False


class Holder(Part, frozen=True, kw_only=True):
    """A device (or an equal group) in a stage, with its samples of each micro-batch."""

    devices: tuple[str, ...]
    samples: int


class StageBox(Part, frozen=True, kw_only=True):
    """A stage in the picture; `weight` is its width beside the other stages of its pipeline.

    `title` is its layers in short, `layers` all of them, `facts` what else is to be said.
    """

    number: int
    title: str
    layers: tuple[str, ...]
    weight: float
    facts: tuple[str, ...]
    holders: tuple[Holder, ...]


class PipelineRow(Part, frozen=True, kw_only=True):
    """A pipeline in the picture: `part` of the global batch in `micro_batches` (their sizes in words)."""

    samples: int
    part: float
    micro_batches: str
    stages: tuple[StageBox, ...]


class Memory(Part, frozen=True, kw_only=True):
    """Bytes on one device: what the plan says, what was measured, what there is; absent where unknown."""

    device: str
    predicted: float | None = None
    predicted_source: str = ""
    measured: float | None = None
    measured_source: str = ""
    limit: float | None = None
    limit_source: str = ""


class PlanPicture(Part, frozen=True, kw_only=True):
    """Who holds what: `devices` in order, so that each has one colour everywhere."""

    headline: str
    why: str
    devices: tuple[str, ...]
    pipelines: tuple[PipelineRow, ...]
    memory: tuple[Memory, ...]
    table: Table
    weight_unit: str


class Lanes(Part, frozen=True, kw_only=True):
    """Spans of one trace in columns of equal length, one lane a device, sorted by start.

    `device`, `action` and `cause` are places in the lists of names; `start_ns` counts from the trace's
    beginning. `steps` are the numbers of the steps, held-out evaluation is -1.
    """

    source: str
    note: str
    devices: tuple[str, ...]
    actions: tuple[str, ...]
    steps: tuple[int, ...]
    device: tuple[int, ...]
    action: tuple[int, ...]
    cause: tuple[int, ...]
    step: tuple[int, ...]
    start_ns: tuple[int, ...]
    length_ns: tuple[int, ...]


class Timeline(Part, frozen=True, kw_only=True):
    """Measured and predicted lanes; `causes` are (key, name) in the order that `Lanes.cause` counts."""

    causes: tuple[tuple[str, str], ...]
    traces: tuple[Lanes, ...]
    notes: tuple[str, ...] = ()


class Lost(Part, frozen=True, kw_only=True):
    """Seconds of a step by device and cause beyond what the same samples take alone; see report.accounting.

    `rows` end with the whole job, whose causes add up to `gap_s`.
    """

    causes: tuple[tuple[str, str], ...]
    table: Table
    sentence: str
    gap_s: float


class Pair(Part, frozen=True, kw_only=True):
    """Seconds of a step, predicted and measured."""

    device: str
    cause: str
    predicted_s: float
    measured_s: float


class Beside(Part, frozen=True, kw_only=True):
    """Predicted beside measured by device and cause."""

    pairs: tuple[Pair, ...]
    table: Table
    sentence: str


class Curves(Part, frozen=True, kw_only=True):
    """Step by step: loss (absent where it was not finite), seconds; `references` are lines to read it by.

    `every` is 1 where every step is there; else each point is the mean of so many steps.
    """

    step: tuple[int, ...] = ()
    loss: tuple[float | None, ...] = ()
    step_s: tuple[float, ...] = ()
    every: int = 1
    references: tuple[tuple[str, float], ...] = ()
    predicted_s: tuple[float, float, float] | None = None


class Said(Part, frozen=True, kw_only=True):
    """A decision with its reason, verbatim; `source` is the file that holds it."""

    kind: str
    subject: str
    reason: str
    source: str


class Progress(Part, frozen=True, kw_only=True):
    """How far a run is; `total` is absent where the run did not say."""

    done: int
    total: int | None
    left_s: float | None


class Document(Part, frozen=True, kw_only=True):
    """All that a page shows of one run; absent parts are those that the run's files do not hold."""

    name: str
    headline: str
    badges: tuple[tuple[str, str], ...]
    progress: Progress
    stats: tuple[Stat, ...]
    plan: PlanPicture
    timeline: Timeline | None
    lost: Lost | None
    beside: Beside | None
    curves: Curves
    said: tuple[Said, ...]
    cost: Table | None
    cost_note: str
    text: str
    notes: tuple[str, ...]


class Comparison(Part, frozen=True, kw_only=True):
    """Two runs side by side."""

    name: str
    table: Table
    lost: Table | None
    curves: Curves
    notes: tuple[str, ...] = ()
