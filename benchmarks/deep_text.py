"""The model of examples/text.py, twice as wide, with 16 blocks: more than a small device holds.

evener train benchmarks/deep_text.py --rehearse examples/fleets/small-memory.json --steps 10
"""

import importlib.util
import sys
from pathlib import Path

import evener as ev

BLOCKS, WIDTH, CONTEXT, GLOBAL_BATCH = 16, 128, 128, 16
TEXT = Path(__file__).resolve().parent.parent / "examples" / "text.py"


def recipe() -> ev.Recipe:
    """The example's recipe with other sizes."""
    spec = importlib.util.spec_from_file_location("deep_text_example", TEXT)
    assert spec is not None and spec.loader is not None
    text = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = text
    spec.loader.exec_module(text)
    text.NUM_LAYERS, text.WIDTH, text.CONTEXT, text.GLOBAL_BATCH = BLOCKS, WIDTH, CONTEXT, GLOBAL_BATCH
    return text.recipe()
