"""Every error evener raises: one tree, each with a stable code and a section in docs/errors.md.

A message has four parts, in this order: what happened, the numbers, what would work, the code.
Exit codes: 1 means "no" (no plan fits, not exact), 2 means wrong use or a broken environment.
"""


class EvenerError(Exception):
    """Base of all errors of evener.

    `what` says what happened and names the device or file; `numbers` gives the figures behind it;
    `remedy` says what would work.
    """

    code = "EV000"
    exit_code = 2

    def __init__(self, what: str, *, numbers: str = "", remedy: str = "") -> None:
        self.what, self.numbers, self.remedy = what, numbers, remedy
        super().__init__(self.render())

    def render(self) -> str:
        """The four parts as text, one line each; absent parts are left out."""
        lines = [self.what]
        if self.numbers:
            lines.append(f"  numbers: {self.numbers}")
        if self.remedy:
            lines.append(f"  what would work: {self.remedy}")
        lines.append(f"  {self.code}: see docs/errors.md#{self.code.lower()}")
        return "\n".join(lines)

    def add_numbers(self, more: str) -> None:
        """Further figures, from who knows them and did not raise this."""
        self.numbers = "; ".join(filter(None, (self.numbers, more)))
        self.args = (self.render(),)

    def __reduce__(self):
        return _rebuild, (type(self), self.what, self.numbers, self.remedy)


def _rebuild(kind: type[EvenerError], what: str, numbers: str, remedy: str) -> EvenerError:
    return kind(what, numbers=numbers, remedy=remedy)


class FileError(EvenerError):
    """A file is missing, unreadable, or not of the shape it should have."""

    code = "EV101"


class UnknownNameError(EvenerError):
    """A device, kind, layer or link was named that the files at hand do not hold."""

    code = "EV102"


class UsageError(EvenerError):
    """An argument is wrong, or two arguments contradict each other."""

    code = "EV103"


class StateError(EvenerError):
    """Training state, from a checkpoint or another device, is damaged, incomplete or of another model."""

    code = "EV104"


class NoPlanFitsError(EvenerError):
    """No plan satisfies all limits; the message names the limits that clash."""

    code = "EV201"
    exit_code = 1


class PlanMismatchError(EvenerError):
    """A plan does not fit the devices, model or batch it is used with."""

    code = "EV202"


class OutOfRangeError(EvenerError):
    """A prediction was asked for far outside what was measured."""

    code = "EV203"


class ScheduleError(EvenerError):
    """A schedule has an unmatched send, a deadlock, or runs a micro-batch not exactly once."""

    code = "EV204"


class DataError(EvenerError):
    """The dataset is empty, too small, or raised while a batch was being read.

    `at` is the (stage, micro-batch) that was at hand, where that is known; of ModelError too.
    """

    code = "EV301"
    at: tuple[int, int] | None = None


class ModelError(EvenerError):
    """The user's model, loss or optimiser raised, or did something that cannot be run."""

    code = "EV302"
    at: tuple[int, int] | None = None


class NonFiniteError(EvenerError):
    """A loss or gradient is NaN or infinite on a named device."""

    code = "EV303"


class OutOfMemoryError(EvenerError):
    """A device ran out of memory and no smaller micro-batch was allowed."""

    code = "EV304"


class PeerLostError(EvenerError):
    """Another device of the job failed, was killed, or went silent."""

    code = "EV401"


class ReductionMismatchError(EvenerError):
    """Two devices met in one reduction with different (step, bucket) or sizes."""

    code = "EV402"


class StateLostError(EvenerError):
    """Devices were lost with the only copy of a part of the model or of its optimiser's state."""

    code = "EV403"


class RefusedError(EvenerError):
    """A device may not join this job: wrong token, other model, data, script or version, or a name in use."""

    code = "EV404"


class DividedError(EvenerError):
    """Too few devices of a job reach each other: the others may go on somewhere else."""

    code = "EV405"


class NotExactError(EvenerError):
    """`verify` found a gradient or parameter further from the reference than promised."""

    code = "EV501"
    exit_code = 1


class EnvironmentBrokenError(EvenerError):
    """Something outside evener is missing or broken: a package, a port, a device."""

    code = "EV601"
