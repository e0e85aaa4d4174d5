"""What each device's part of a plan is worth, in samples of the whole model, and what it would do alone.

pipeline of 16 samples     a: layers of 3 of 4 seconds on a's kind     worth 12
                           b: layers of 1 of 4 seconds on b's kind     worth  4
"""

from evener.core.plan import Plan, share_samples
from evener.cost.evaluate import CostModel


def useful_samples(model: CostModel, plan: Plan) -> dict[str, float]:
    """Samples of a global batch that each device's work is worth; they sum to the global batch.

        raw_d = Σ over its stages of samples · (seconds of the stage's layers ÷ of all layers, on d's kind)
        worth_d = raw_d · global batch / Σ raw

    Seconds are those of a forward and backward at the samples of one micro-batch. Shares are of one device
    each. Example: the picture above. Errors of the tables pass through.
    """
    index = {layer.name: i for i, layer in enumerate(model.profile.layers)}
    raw = dict.fromkeys(plan.devices, 0.0)
    for _, which, stage in plan.numbered_stages():
        first, last = index[stage.layers[0]], index[stage.layers[-1]] + 1
        taken = share_samples(stage, plan.pipelines[which])
        for share, samples in zip(stage.shares, taken, strict=True):
            (name,) = share.devices
            forward, backward = model.layers(model.fleet.device(name).kind).seconds(share.samples)
            both = forward + backward
            raw[name] += samples * float(both[first:last].sum() / both.sum())
    scale = plan.global_batch / sum(raw.values())
    return {name: value * scale for name, value in raw.items()}


def unbounded_samples_per_s(model: CostModel, kind: str, global_batch: int) -> float:
    """What a device of `kind` would do alone if its memory held the model, from its layers' seconds.

    The best measured micro-batch b counts: 1 / (seconds(b) / b + update ÷ global batch). Example: 0.2 s for
    2 samples and an update of 0.1 s in batches of 10 give 1 / (0.1 + 0.01) = 9.09 samples/s.
    """
    layers = model.layers(kind)
    sizes = [int(b) for b in layers.sizes if b <= global_batch] or [1]
    sample_s = min(sum(float(x.sum()) for x in layers.seconds(b)) / b for b in sizes)
    return 1 / (sample_s + float(layers.update_s.sum()) / global_batch)
