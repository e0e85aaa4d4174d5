"""What else goes along when devices change: statistics of all waves, the loss scale; placed tables do not."""

import re
import signal
import time

import pytest
from msgspec.structs import replace
from safetensors.torch import load_file

from evener.core.plan import Pipeline, Plan, Share, Stage
from evener.errors import EvenerError
from evener.runtime.checkpoints.folder import newest_good
from evener.session.checkpoints.save_rule import Rule
from evener.session.launching.launch import launch
from tests.faults.jobs import NAMES, request_for, signalled, split

pytestmark = pytest.mark.timeout(120)

SCRIPT = """
import time, torch, evener as ev
from torch import nn

torch.manual_seed(0)

class Data:
    x = torch.{data}
    y = torch.arange(48) % 3
    def __len__(self): return 48
    def __getitem__(self, i):
        time.sleep(0.004)
        return self.x[i], self.y[i]

def recipe():
    model = nn.Sequential({layers})
    return ev.Recipe(model=model, dataset=Data(), loss=nn.CrossEntropyLoss(), global_batch=12,
                     optimizer=lambda p: torch.optim.SGD(p, lr=0.01), {more})
"""


def in_waves(*samples: int) -> Plan:
    """Micro-batches of two: the first device is in every wave, the others only in some."""
    pipelines = tuple(
        Pipeline(
            samples=n,
            micro_batch=2,
            stages=(Stage(layers=("0", "1", "2"), shares=(Share(devices=(d,), samples=2),)),),
        )
        for d, n in zip(NAMES, samples, strict=False)
    )
    return Plan(global_batch=12, pipelines=pipelines)


def job(tmp_path, plan, steps, data, layers, more="", faults=""):
    request = request_for(tmp_path, plan, steps=steps, faults=faults)
    (tmp_path / "job.py").write_text(SCRIPT.format(data=data, layers=layers, more=more))
    return request


def test_the_statistics_of_all_waves_go_along_when_their_only_holder_leaves(tmp_path) -> None:
    layers = "nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)"
    request = job(tmp_path, in_waves(8, 2, 2), 30, "randn(48, 5)", layers, 'batch_norm="wave"')
    outcome = signalled(request, "lab/a", signal.SIGTERM, after=3)
    told = next(s for s in outcome.decisions if s.startswith("generation 2, "))
    left_at = int(re.search(r"before step (\d+)", told)[1])
    waves = 4 * left_at + 3 * (30 - left_at)
    assert int(load_file(tmp_path / "run" / "model.safetensors")["1.num_batches_tracked"]) == waves


def test_the_loss_scale_goes_along_and_the_end_is_saved(tmp_path) -> None:
    layers, more = "nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)", 'precision="float16"'
    request = job(tmp_path, split(4, 4, 4), 12, "randn(48, 5)", layers, more, faults="leave lab/c at 6")
    outcome = launch(replace(request, checkpoint=Rule(steps=100)))
    assert any("lab/c is lost" in s for s in outcome.decisions)
    found, _ = newest_good(tmp_path / "run")
    assert found is not None and found.manifest.position.step == 12
    assert found.manifest.loss_scale.good_steps == 12


def test_a_lost_device_ends_a_job_that_places_tables_and_says_so(tmp_path) -> None:
    """Story: the others went on with the rows that they happened to have, until an index was out of range."""
    layers = "nn.Embedding(20, 6), nn.Tanh(), nn.Linear(6, 3)"
    data, more = "arange(48) % 20", 'place={"0": "cpu"}'
    request = job(tmp_path, split(4, 4, 4), 200, data, layers, more)
    before = time.monotonic()
    with pytest.raises(EvenerError) as told:
        signalled(request, "lab/b", signal.SIGKILL, after=3)
    assert "lab/b" in str(told.value) and time.monotonic() - before < 40
