"""How the program that runs a plan behaves, as far as seconds and bytes depend on it."""

from dataclasses import dataclass

from evener.core.buckets import BUCKET_BYTES


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """What differs between training programs that run the same plan on the same devices.

    `blocking_sends`: a transfer holds both its ends while it lasts, instead of passing beside their work.
    `bucket_bytes`: gradients that are summed together; infinite means one flat copy of all of them, summed
    after the last backward. `transient_layers`: bytes that come and go while one layer's backward runs, in
    units of what the largest layer of the stage saves. `step_s`: seconds a step costs whatever is in it.
    """

    blocking_sends: bool = False
    bucket_bytes: float = BUCKET_BYTES
    transient_layers: float = 0.0
    step_s: float = 0.0


EVENER = Trainer()
"""Our own runtime: asynchronous sends, buckets that leave during the last backward."""
