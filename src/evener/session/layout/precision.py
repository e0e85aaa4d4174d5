"""Which devices of a plan compute in less than float32, and what has to be said and done about it.

Parameters, gradients and sums stay in float32: autocast rounds only what enters matrix products. A tensor
crosses a cut in the dtype in which it was made; the stage that receives it casts it to its own.
"""

from evener.core.plan import Plan
from evener.session.recipe import Recipe


def lower_precision(plan: Plan, recipe: Recipe) -> dict[str, tuple[str, ...]]:
    """Devices by the precision below float32 that they compute in, in the plan's order.

    A stage that names none has the recipe's. Example: {"bfloat16": ("lab1/b",)}.
    """
    found: dict[str, dict[str, None]] = {}
    for _, _, stage in plan.numbered_stages():
        precision = stage.precision or recipe.precision
        if precision != "float32":
            names = found.setdefault(precision, {})
            names.update(dict.fromkeys(n for share in stage.shares for n in share.devices))
    return {precision: tuple(names) for precision, names in found.items()}


def needs_loss_scale(plan: Plan, recipe: Recipe) -> bool:
    """Whether any stage's gradients pass through float16, which loses the smallest ones without."""
    return "float16" in lower_precision(plan, recipe)


def precision_parts(plan: Plan, recipe: Recipe) -> tuple[str, ...]:
    """Sentences for the plan's `inexact`, one for each precision below float32."""
    return tuple(
        f"{precision} on {', '.join(devices)}: matrix products there are rounded to it, weights and sums are "
        "float32" + ("; one loss scale for all devices" if precision == "float16" else "")
        for precision, devices in lower_precision(plan, recipe).items()
    )
