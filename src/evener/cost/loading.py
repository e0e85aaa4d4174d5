"""What devices hold at most while state is put into them: weights that are loaded, a run that is taken up."""

from collections import Counter

from evener.core.plan import Plan
from evener.cost.memory import load_peak_bytes
from evener.cost.model import CostModel


def load_bytes(model: CostModel, plan: Plan) -> dict[str, int]:
    """Bytes by device of `plan` at the peak of loading, see `load_peak_bytes`; each layer counts once.

    Devices that keep only parts of the state, and stages whose parameters live on the host, are left out.
    Layers that several devices hold have room for their summed gradients before. Example: an accelerator
    alone whose stage has 100 bytes of parameters and 200 of state: 300.
    """
    held: dict[str, dict[int, int]] = {}
    for _, _, stage in plan.numbered_stages():
        if plan.owners or stage.residence is not None:
            continue
        first, last = model.span(stage)
        for share in stage.shares:
            for name in share.devices:
                degrees = {i: len(share.devices) for i in range(first, last)}
                held[name] = degrees | held.get(name, {})
    holders = Counter(i for degrees in held.values() for i in degrees)
    found = {}
    for name, degrees in held.items():
        sums = [0.0, 0.0, 0.0, 0.0]
        for i, degree in degrees.items():
            data = model.bytes_at(degree)
            rows = [data.parameters, data.optimizer, data.buffers]
            rows += [data.gradients] if holders[i] > degree else []
            for k, row in enumerate(rows):
                sums[k] += float(row[i + 1] - row[i])
        apart = model.fleet.device(name).type != "cpu"
        found[name] = round(load_peak_bytes(*sums, apart=apart))
    return found
