"""Who takes part in a job, and what its devices know of the step in flight when that changes.

generation 1: a b c   ──  c is lost in step 7  ──►   a and b tell their standing; step 7 is completed if
generation 2: a b                                    one of them has its ballot, and redone otherwise
"""

from evener.core.figures import Value
from evener.core.fleet import Fleet
from evener.core.plan import Plan
from evener.core.ranges import Ranges


class Ballot(Value, frozen=True, kw_only=True):
    """What all devices agreed on in `step`: the summed tally, and the square norm where one was asked for.

    Who has it knows that every device of that step holds all sums of gradients.
    """

    step: int
    tally: tuple[float, ...]
    square_norm: float | None = None


class ScaleState(Value, frozen=True, kw_only=True):
    """The loss scale of a job in float16, and its good steps since it last changed."""

    value: float
    good_steps: int


class Electorate(Value, frozen=True, kw_only=True):
    """Whose consent it takes to go on after a generation: its `devices`, who met at `store`.

    `store` is "" for the job's first one, else "host:port" of a standby; `bound` are the devices that end
    with it.
    """

    devices: tuple[str, ...]
    store: str = ""
    bound: tuple[str, ...] = ()


class HeldRows(Value, frozen=True, kw_only=True):
    """Rows `start` to `stop` of a table are on `device`."""

    device: str
    start: int
    stop: int


class Snapshot(Value, frozen=True, kw_only=True):
    """Copies of state as of before `step`, after `samples_seen` samples: the names that a device keeps."""

    step: int
    samples_seen: int
    names: tuple[str, ...] = ()
    loss_scale: ScaleState | None = None


class Standing(Value, frozen=True, kw_only=True):
    """What `device` says when a generation ends: it would take `step` next, after `samples_seen` samples.

    `holds` are the names of parameters and buffers whose state it has as of then; of those in `partly` it has
    seen only some waves, and another device all: that one's count. `ballot` is of the newest
    step that it concluded; `is_summed` says that it holds all sums of `step`, whose ballot it lacks.
    A device that `stood_by` had no part in the generation, and what it holds may have become old.
    `kept` are the samples of the global batch of `step` whose gradients it has, in no sum with others' yet;
    `kept_none` says why there are none, where it had begun that step. `rows` are those of placed
    tables that it has.
    """

    device: str
    step: int
    samples_seen: int
    holds: tuple[str, ...] = ()
    partly: tuple[str, ...] = ()
    loss_scale: ScaleState | None = None
    ballot: Ballot | None = None
    is_summed: bool = False
    stood_by: bool = False
    snapshots: tuple[Snapshot, ...] = ()
    kept: Ranges = ()
    kept_none: str = ""
    rows: dict[str, Ranges] = {}
    serves: str = ""
    electorates: tuple[Electorate, ...] = ()


class Rest(Value, frozen=True, kw_only=True):
    """How a step is finished of which some devices kept samples: ranges of its global batch, by device.

    `anew` are micro-batches in the order in which a device runs them. Together with `kept` every sample is in
    here once.
    """

    kept: dict[str, Ranges]
    anew: dict[str, Ranges]


class Turn(Value, frozen=True, kw_only=True):
    """How a generation begins: the plan, who is there, and from where the job goes on.

    `members` may be more than the plan uses: a device that leaves still hands over what only it holds. It is
    not in `fleet` any more; `handing_over` is the fleet of all members, where some of them leave.
    `holders` has, by name of parameter and buffer, who has its state as of `step`; with `rewind` that state
    is in their copies of before `step`. `ballot` concludes the step before for those who lack it. `rest` is
    what is left to do of `step` where samples of it are kept. `rows` has by table who gives which rows;
    who is to have them says the plan. `standbys` has, in the order in which they are tried, where devices
    serve standbys for the job's store. Until the generation is formed its members need all `electorates`,
    from then on the last of them, which is its own.
    """

    fleet: Fleet
    plan: Plan
    members: tuple[str, ...]
    step: int = 0
    samples_seen: int = 0
    holders: dict[str, tuple[str, ...]] = {}
    loss_scale: ScaleState | None = None
    leaves: tuple[str, ...] = ()
    handing_over: Fleet | None = None
    ballot: Ballot | None = None
    rewind: bool = False
    rest: Rest | None = None
    rows: dict[str, tuple[HeldRows, ...]] = {}
    reasons: tuple[str, ...] = ()
    standbys: dict[str, str] = {}
    electorates: tuple[Electorate, ...] = ()

    @property
    def stays(self) -> tuple[str, ...]:
        """The members that are still there once state was handed over."""
        return tuple(m for m in self.members if m not in self.leaves)

    @property
    def everyone(self) -> Fleet:
        """The fleet of all members."""
        return self.handing_over or self.fleet
