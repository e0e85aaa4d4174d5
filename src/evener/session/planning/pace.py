"""Before a rehearsal: have the devices rates for the model, and can this machine compute as fast?"""

import os
import time

import torch

from evener.core.fleet import Fleet
from evener.core.plan import Plan
from evener.core.profile import Profile
from evener.core.words import some
from evener.probing.rates import product_rate
from evener.rehearsal.verdict import foreseen
from evener.session.recipe import Recipe

TRIED_S = 0.05
PASSES = 3.0  # a backward takes two products for each one of the forward


def too_fast(plan: Plan, profile: Profile | None) -> str:
    """Why timings of `plan` will be void on this machine, from what its layers compute in a step; "" if not.

    Without a profile or a prediction nothing is known beforehand. Tries one core for a moment, in float32.
    """
    if profile is None or plan.prediction is None:
        return ""
    flops = PASSES * plan.global_batch * sum(layer.flops_per_sample for layer in profile.layers)
    one = product_rate(torch.device("cpu"), torch.float32, clock=time.perf_counter, slot_s=TRIED_S)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = min(torch.get_num_threads(), cores)
    return foreseen(flops, plan.prediction.step_s, one * cores / threads)


def without_rate(fleet: Fleet, recipe: Recipe) -> str:
    """Which devices have no rate for the matrices of the model, so that they cannot be paced; "" if none.

    Example: a float64 model and a/0 with a rate for float32 alone: "no rate for float64 on a/0".
    """
    of_model = {p.dtype for p in recipe.model.parameters() if p.ndim > 1 and p.is_floating_point()}
    names = [str(d).removeprefix("torch.") for d in ({recipe.autocast} if recipe.autocast else of_model)]
    lacking = {n: [d.name for d in fleet.devices if d.flops and n not in d.flops] for n in sorted(names)}
    return "; ".join(f"no rate for {name} on {some(on, 8)}" for name, on in lacking.items() if on)
