"""What can go wrong between two devices, in words."""

from evener.errors import PeerLostError, ReductionMismatchError


def lost(peer: str, doing: str, why: object) -> PeerLostError:
    """`peer` is gone while this device was `doing` something."""
    return PeerLostError(
        f"{peer} left while {doing}",
        numbers=str(why).splitlines()[0] if str(why) else "",
        remedy=f"look for the first error of {peer}; the job can be started again",
    )


def stalled(peer: str, key: str, timeout_s: float, *, verb: str = "send") -> PeerLostError:
    """`peer` is there, and does nothing. Example: lab1/b did not send 1SEND_F2 of step 3 within 30 s."""
    return PeerLostError(
        f"{peer} did not {verb} {key} within {timeout_s:g} s",
        remedy=f"see what {peer} is busy with; a longer timeout if it only is slow",
    )


def mismatch(here: str, expected: str, source: str, got: str) -> ReductionMismatchError:
    """The two ends of a pair do not run the same schedule."""
    return ReductionMismatchError(
        f"{here} waits for {expected} from {source}, which sent {got}",
        remedy="the same plan and schedule on all devices",
    )
