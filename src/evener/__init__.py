"""evener: train one PyTorch model on unequal devices.

Names are loaded when first used, so that `import evener` and the pure half need no torch.
"""

from importlib import import_module
from typing import Any

_HOME = {
    "Recipe": "evener.session.recipe",
    "train": "evener.session.train",
    "predict": "evener.session.predict",
    "load_weights": "evener.session.checkpoints.tensors",
    "load_checkpoint": "evener.session.drop_in.checkpoints",
    "save_checkpoint": "evener.session.drop_in.checkpoints",
    "prepare": "evener.session.drop_in.prepare",
    "verify": "evener.session.exactness.verify",
    "TableAdam": "evener.runtime.tables.optimizers",
    "TableAdagrad": "evener.runtime.tables.optimizers",
    "TableSGD": "evener.runtime.tables.optimizers",
    "Pipe": "evener.integrations.pipe",
    "auto_balance": "evener.integrations.balancing",
    "EvenerError": "evener.errors",
    "Fleet": "evener.core.fleet",
    "Device": "evener.core.fleet",
    "Link": "evener.core.fleet",
    "Profile": "evener.core.profile",
    "Job": "evener.core.job",
    "Plan": "evener.core.plan",
}
__all__ = sorted(_HOME)
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'evener' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
