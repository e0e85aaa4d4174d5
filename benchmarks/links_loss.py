"""What compression between hosts does to training: the text example's held-out loss with and without it.

    python benchmarks/links_loss.py --compress int8 --steps 80 --json

One process plays two hosts of two: each device's part of a batch has its own gradient, and the wires of the
four sum them through mailboxes. Both trainings start from the same weights and see the same samples.
"""

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from common import TEXT, Bar, finish, parser, say  # noqa: E402
from torch import nn  # noqa: E402

from evener.core.exchange import exchange_of  # noqa: E402
from evener.core.plan import Reduction  # noqa: E402
from evener.session.recipe import Recipe, load_recipe  # noqa: E402
from tests.mailboxes import Post, wires  # noqa: E402

NAMES = ("a/0", "a/1", "b/0", "b/1")


def reductions(compression: str | None) -> tuple[Reduction, ...]:
    lanes = (("a/0", "b/0"), ("a/1", "b/1"))
    return (
        Reduction(devices=NAMES[:2], transport="gloo"),
        Reduction(devices=NAMES[2:], transport="gloo"),
        *(Reduction(devices=x, transport="gloo", part=0.5, compression=compression) for x in lanes),
    )


def loss_of(recipe: Recipe, samples: list[Any]) -> torch.Tensor:
    args, kwargs, target = recipe.problem.inputs(recipe.collate_fn(samples))
    result = recipe.problem.loss(recipe.model(*args, **kwargs), target)
    return result[0] if isinstance(result, tuple) else result


def trained(compression: str | None, steps: int, each: int, heldout: int) -> float:
    """Held-out loss after `steps` steps of `each` samples a device."""
    recipe = load_recipe(str(TEXT), 0)
    parameters = [p for p in recipe.model.parameters() if p.requires_grad]
    optimizer = recipe.optimizer(parameters)
    exchange = exchange_of(reductions(compression), NAMES)
    assert exchange is not None
    made = wires(exchange, Post())
    order = torch.randperm(len(recipe.dataset), generator=torch.Generator().manual_seed(0)).tolist()
    for step in range(steps):
        flats = {}
        for i, device in enumerate(NAMES):
            start = (step * len(NAMES) + i) * each
            torch.manual_seed(start)  # dropout draws alike in both trainings
            loss = loss_of(recipe, [recipe.dataset[order[(start + k) % len(order)]] for k in range(each)])
            grads = torch.autograd.grad(loss, parameters)
            flats[device] = nn.utils.parameters_to_vector([g / len(NAMES) for g in grads])
        pending = [wire.all_reduce(flats[d], f"step {step}, bucket 0") for d, wire in made.items()]
        for p in pending:
            p.wait()
        whole = flats["a/0"].split([p.numel() for p in parameters])
        for p, grad in zip(parameters, whole, strict=True):
            p.grad = grad.view_as(p)
        optimizer.step()
    recipe.model.eval()
    with torch.no_grad():
        return float(loss_of(recipe, [recipe.heldout[i] for i in range(min(heldout, len(recipe.heldout)))]))


def main() -> int:
    p = parser(__doc__)
    p.add_argument("--compress", default="int8", help="the way between hosts")
    p.add_argument("--steps", type=int, default=80)
    p.add_argument("--each", type=int, default=6, help="samples of a device in a step")
    p.add_argument("--heldout", type=int, default=256, help="samples that the loss is of")
    options = p.parse_args()
    torch.set_num_threads(1)
    size = options.steps, options.each, options.heldout
    first, exact, lossy = trained(None, 0, *size[1:]), trained(None, *size), trained(options.compress, *size)
    say(f"held-out loss {first:.4f} before, {exact:.4f} exact, {lossy:.4f} with {options.compress}")
    figures = {"steps": options.steps, "before": first, "exact": exact, options.compress: lossy}
    bars = [
        Bar(name="held-out loss, off by", value=abs(lossy / exact - 1), at_most=0.01),
        Bar(name="exact loss over that before", value=exact / first, at_most=0.9),
    ]
    return finish(figures, bars, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
