"""What becomes of the step in flight when a device is lost, and whose state is taken.

reduce ──► ballot ──► move       a ballot somewhere: all survivors hold the sums, so all conclude the step
                                 none: nobody has moved, so it is taken anew, or what is left of it (rest.py)
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

from evener.core.figures import Value
from evener.core.membership import Ballot, ScaleState, Standing
from evener.core.words import counted, some
from evener.errors import StateLostError


class Settlement(Value, frozen=True, kw_only=True):
    """The job goes on with `step` after `samples_seen` samples, its state with `holders` by name.

    `ballot` concludes the step before for those who lack it. With `rewind` everybody goes back to the copies
    of before `step`.
    """

    step: int
    samples_seen: int
    holders: dict[str, tuple[str, ...]]
    loss_scale: ScaleState | None = None
    ballot: Ballot | None = None
    rewind: bool = False
    reason: str = ""


def settle(standings: Sequence[Standing], names: Collection[str]) -> Settlement:
    """From where the devices with `standings` go on, when the model's parameters and buffers are `names`.

    Devices that hold nothing, as those that join, count for nothing but their copies. Raises StateLostError
    when some of `names` is on none of them and in no snapshot, or the devices disagree in a way that no lost
    device explains.
    Example: a would take step 8 and has the ballot of step 7, b has the sums of step 7: b concludes step 7,
    both take step 8. Without any ballot of step 7 both redo it.
    """
    there = [s for s in standings if s.holds]
    if not there:
        return _rewound(standings, names, list(names))
    newest = max(there, key=lambda s: s.step)
    there = [s for s in there if s.step == newest.step or not s.stood_by]
    behind = [s for s in there if s.step < newest.step]
    ballot = newest.ballot if behind else None
    torn = [s for s in behind if not (s.is_summed and ballot and s.step == ballot.step == newest.step - 1)]
    sound = [s for s in there if s not in torn]
    holders = _holders((s.device, [n for n in s.holds if n not in s.partly]) for s in sound)
    for s in sound:
        for name in s.partly:
            holders.setdefault(name, (s.device,))
    lost = [n for n in names if n not in holders]
    if lost:
        return _rewound(standings, names, lost)
    if torn:
        raise StateLostError(
            f"{torn[0].device} is at step {torn[0].step} while {newest.device} would take step {newest.step}",
            numbers=f"standing told by {counted(len(there), 'device')}",
            remedy="start again from the newest checkpoint: --resume",
        )
    if behind:
        reason = f"step {newest.step - 1} is concluded: {newest.device} has what all agreed on"
    else:
        reason = f"nothing of step {newest.step} was applied"
    return Settlement(
        step=newest.step,
        samples_seen=newest.samples_seen,
        holders=holders,
        loss_scale=newest.loss_scale,
        ballot=ballot,
        reason=reason,
    )


def _rewound(standings: Sequence[Standing], names: Collection[str], lost: Sequence[str]) -> Settlement:
    """Everybody goes back to the newest snapshot that has all names."""
    newest = max(s.step for s in standings)
    kept = {snap.step: snap for s in standings for snap in s.snapshots}
    for step in sorted(kept, reverse=True):
        holders = _holders(
            (s.device, snap.names) for s in standings for snap in s.snapshots if snap.step == step
        )
        if all(n in holders for n in names):
            return Settlement(
                step=step,
                samples_seen=kept[step].samples_seen,
                holders=holders,
                loss_scale=kept[step].loss_scale,
                rewind=True,
                reason=f"only lost devices held {some(lost, 3)}; back to the copies of before step {step}, "
                f"{newest - step} steps are taken anew",
            )
    raise StateLostError(
        f"only lost devices held {some(lost, 3)}, and no device has a copy",
        numbers=f"snapshots of before steps {sorted(kept)}" if kept else "no snapshots",
        remedy="start again from the newest checkpoint: --resume",
    )


def moves(
    holders: Mapping[str, Sequence[str]], wanted: Mapping[str, Collection[str]], nbytes: Mapping[str, int]
) -> tuple[tuple[str, str, str], ...]:
    """(name, from, to) for every name that a device is to hold and does not, the senders' bytes balanced.

    `wanted` has names by device. The order is one in which all devices can send and receive.
    Example: holders {"w": ("a", "b")}, wanted {"c": ("w",)}: (("w", "a", "c"),).
    """
    load: dict[str, int] = {}
    found = []
    for name in sorted(holders):
        for device in sorted(d for d, names in wanted.items() if name in names):
            if device not in holders[name]:
                source = min(holders[name], key=lambda d: (load.get(d, 0), d))
                load[source] = load.get(source, 0) + nbytes.get(name, 0)
                found.append((name, source, device))
    return tuple(found)


def _holders(held: Iterable[tuple[str, Iterable[str]]]) -> dict[str, tuple[str, ...]]:
    found: dict[str, list[str]] = {}
    for device, names in held:
        for name in names:
            found.setdefault(name, []).append(device)
    return {name: tuple(devices) for name, devices in found.items()}
