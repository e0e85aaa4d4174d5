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
from evener.session.fewer import Meetings

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
    """Weights and inner optimiser of this device's group, in the names of the model's own; may be empty."""
    return _read(checkpoint, f"{APART}/{meetings.apart.group.name}/state/") if meetings else {}


def import_apart(meetings: Meetings | None, checkpoint: Checkpoint) -> list[str]:
    """Once weights and optimisers are as they were: go on with what groups have; what is not the same."""
    groups = {_group_of(n) for n in checkpoint.manifest.tensors if n.startswith(f"{APART}/")}
    if meetings is None:
        first = "the checkpoint is of hosts that took steps by themselves: all go on from the first one's"
        return [first] if groups else []
    local, late, group = meetings.local, meetings.late, meetings.apart.group
    outer, own = _read(checkpoint, f"{OUTER}/"), _read(checkpoint, f"{APART}/{group.name}/own/")
    if local:
        if outer and own:
            local.restore(outer)
            local.restore_own(own)
            return []
        local.begin()
    elif late and "late/tail" in own:
        late.restore_own(own)
        return []
    begins = f"hosts take steps by themselves ({meetings.apart.fewer}) from here on"
    if not groups:
        return [begins]
    return [
        f"{begins}: the checkpoint is of other groups or another way, and all go on from one of its hosts"
    ]


def _group_of(name: str) -> str:
    """Example: "apart/h2/cpu/own/round" is of "h2/cpu"."""
    return "/".join(name.split("/")[1:3])


def _read(checkpoint: Checkpoint, prefix: str) -> dict[str, Tensor]:
    found = checkpoint.read([n for n in checkpoint.manifest.tensors if n.startswith(prefix)])
    return {name.removeprefix(prefix): tensor for name, tensor in found.items()}
