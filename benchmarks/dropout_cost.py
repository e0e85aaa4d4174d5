"""What keyed dropout costs beside nn.Dropout: forward and backward of one layer, in turn, on this machine.

python benchmarks/dropout_cost.py [--quick] [--json] [--device cuda]
"""

import sys
import time
from statistics import median

import torch
from common import finish, parser, say
from torch import nn

from evener.runtime.dropout import KeyedDropout, dropout_keys

SHAPES = {
    "a small layer": (8, 128, 96),
    "a feed-forward layer": (16, 256, 1024),
    "a picture": (4, 64, 112, 112),
}


def once(layer: nn.Module, x: torch.Tensor, gradient: torch.Tensor) -> float:
    """Seconds of one forward and backward."""
    x.grad = None
    start = time.perf_counter()
    layer(x).backward(gradient)
    if x.device.type != "cpu":
        torch.accelerator.synchronize(x.device)
    return time.perf_counter() - start


def compare(shape: tuple[int, ...], device: str, repeats: int) -> dict[str, float]:
    """Medians of both, and of a second nn.Dropout: the control."""
    x = torch.randn(shape, device=device, requires_grad=True)
    gradient = torch.ones_like(x)
    keyed = KeyedDropout(0.1, "drop", 0)
    layers = {"plain": nn.Dropout(0.1), "keyed": keyed, "control": nn.Dropout(0.1)}
    seconds: dict[str, list[float]] = {name: [] for name in layers}
    for number in range(repeats + 2):
        with dropout_keys([keyed], number, range(shape[0])):
            for name, layer in layers.items():
                took = once(layer, x, gradient)
                if number > 1:
                    seconds[name].append(took)
    return {f"{name}_s": median(s) for name, s in seconds.items()}


def main() -> int:
    """Print the ratio for each shape."""
    p = parser(__doc__ or "")
    p.add_argument("--device", default="cpu")
    args = p.parse_args()
    found = {}
    for name, shape in SHAPES.items():
        found[name] = row = compare(shape, args.device, 3 if args.quick else 30)
        row["ratio"] = row["keyed_s"] / row["plain_s"]
        row["control_ratio"] = row["control_s"] / row["plain_s"]
        size = torch.Size(shape).numel()
        say(
            f"{name} {shape}: nn.Dropout {row['plain_s'] * 1e3:.2f} ms, keyed {row['keyed_s'] * 1e3:.2f} ms "
            f"({row['keyed_s'] / size * 1e9:.1f} ns an entry), ratio {row['ratio']:.2f}, "
            f"control {row['control_ratio']:.2f}"
        )
    return finish({"device": args.device, "shapes": found}, [], as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
