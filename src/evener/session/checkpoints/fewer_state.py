"""What a checkpoint holds of hosts that take steps by themselves, beside the state of any job.

model/…  optimizer/…              the first group's: what plain PyTorch and other plans take
apart/h2/cpu/state/model/…        another group's weights and inner optimiser
apart/h2/cpu/own/…                where a group is in its round, gradients that it has not used yet
outer/…                           anchor and momentum of local steps, the same for all
"""

import torch
from torch import Tensor, nn

from evener.runtime.checkpoints.folder import Checkpoint
from evener.runtime.state import export_state
from evener.session.layout.fewer import Meetings

APART, OUTER = "apart", "outer"


def export_apart(
    meetings: Meetings, held: dict[str, Tensor], optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Tensor], frozenset[str]]:
    """What this device is to write, and which of that changes before the optimiser moves.

    One device of each group writes its group's; waits for what is on its way between groups.
    """
    group, here = meetings.apart.group, meetings.apart.circle.ranks.here
    own = meetings.local or meetings.late
    assert own is not None
    values = own.own_state()  # on all devices: gradients on their way are waited for
    if here != group.name:
        return {}, frozenset()
    found = {f"{APART}/{here}/own/{key}": value for key, value in values.items()}
    moved = frozenset(found)
    if group.number == 0 and meetings.local:
        found |= {f"{OUTER}/{key}": value for key, value in meetings.local.state().items()}
    elif group.number:
        names = [name for name, t in held.items() if isinstance(t, nn.Parameter)]
        state = export_state(held, optimizer, names)
        found |= {f"{APART}/{here}/state/{key}": value for key, value in state.items()}
    return found, moved


def own_group_state(meetings: Meetings | None, checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Weights and inner optimiser of this device's group, in the names of the model's own; may be empty.

    Empty on all devices where they cannot go on as they were, see `import_apart`: they then begin alike.
    """
    if meetings is None or not _goes_on(meetings, checkpoint):
        return {}
    return _read(checkpoint, f"{APART}/{meetings.apart.group.name}/state/")


def import_apart(meetings: Meetings | None, checkpoint: Checkpoint) -> list[str]:
    """Once weights and optimisers are as they were: go on with what groups have; what is not the same.

    A checkpoint of other groups, or of another way, says nothing that all groups could go on with: a round
    begins for all of them.
    """
    is_of_apart = any(n.startswith(f"{APART}/") for n in checkpoint.manifest.tensors)
    if meetings is None:
        first = "the checkpoint is of hosts that took steps by themselves: all go on from the first one's"
        return [first] if is_of_apart else []
    local, late = meetings.local, meetings.late
    if _goes_on(meetings, checkpoint):
        own = _read(checkpoint, f"{APART}/{meetings.apart.group.name}/own/")
        if local:
            local.restore(_read(checkpoint, f"{OUTER}/"))
            local.restore_own(own)
        elif late:
            late.restore_own(own)
        return []
    if local:
        local.begin()
    begins = f"hosts take steps by themselves ({meetings.apart.fewer}) from here on"
    if not is_of_apart:
        return [begins]
    return [
        f"{begins}: the checkpoint is of other groups or another way, and all go on from one of its hosts"
    ]


def _goes_on(meetings: Meetings, checkpoint: Checkpoint) -> bool:
    """Whether the checkpoint is of the same groups and the same way; the same on all devices."""
    mark = "/own/round" if meetings.local else "/own/late/tail"
    there = {n for n in checkpoint.manifest.tensors if n.startswith(f"{APART}/") and n.endswith(mark)}
    return there == {f"{APART}/{name}{mark}" for name in meetings.apart.group.names}


def _read(checkpoint: Checkpoint, prefix: str) -> dict[str, Tensor]:
    found = checkpoint.read([n for n in checkpoint.manifest.tensors if n.startswith(prefix)])
    return {name.removeprefix(prefix): tensor for name, tensor in found.items()}
