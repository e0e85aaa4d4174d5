"""The loss on held-out samples, computed by all devices in their shares."""

import torch

from evener.core.order import samples_by_pipeline
from evener.core.split import spans_of
from evener.runtime.problem import shapes_of, to_device
from evener.runtime.replicas import average_buffers
from evener.session.steps import Steps


def heldout_loss(steps: Steps, wire) -> float:
    """Mean loss over the recipe's held-out dataset, Σ loss / Σ weight over all devices.

    The model is in evaluation mode while this runs; floating buffers are averaged over devices first, each
    weighted by its samples, so that every device evaluates one and the same model.
    """
    recipe, plan, model = steps.recipe, steps.plan, steps.recipe.model
    mine = steps.pipeline
    average_buffers(model, plan.pipelines[mine].samples / plan.global_batch, wire)
    first, last = spans_of(samples_by_pipeline(plan, len(recipe.heldout)))[mine]
    micro_batch = plan.pipelines[mine].micro_batch
    sums = torch.zeros(2, dtype=torch.float64)
    was_training = model.training
    model.eval()
    problem, device = recipe.problem, steps.site.torch_device
    for start in range(first, last, micro_batch):
        chosen = range(start, min(start + micro_batch, last))
        batch = recipe.collate_fn([recipe.heldout[i] for i in chosen])
        weight = problem.weight_of(batch, len(chosen))
        if not weight:
            continue

        def work(batch=batch) -> torch.Tensor:
            with torch.no_grad():
                return problem.forward(model, to_device(batch, device))[0]

        loss = float(steps.site.driver.run("0F0", work, signature=("heldout", shapes_of(batch))))
        sums += torch.tensor([loss * (weight if problem.reduction == "mean" else 1.0), weight])
    model.train(was_training)
    wire.all_reduce(sums, "held-out loss").wait()
    steps.executor.pause()
    return float(sums[0] / sums[1])
