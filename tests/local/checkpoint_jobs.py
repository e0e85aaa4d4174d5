"""A job for tests of checkpoints, in float64: tied weights, BatchNorm, dropout, a learning-rate schedule."""

from pathlib import Path
from typing import Any

from evener.core.plan import Pipeline, Plan, Stage
from evener.report.metrics import read_metrics
from evener.session.checkpoints.save_rule import Keep, Rule
from evener.session.request import Request
from tests.local.plans import stage
from tests.local.runs import run_of

A, B, C, D = "lab/a", "lab/b", "lab/c", "lab/d"
SCRIPT = '''
import glob, os, time, torch, evener as ev
from torch import nn
from torch.nn.functional import cross_entropy

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.one, self.norm = nn.Embedding(11, 8), nn.Linear(8, 8), nn.{norm}
        self.two, self.drop, self.head = nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Parameter(torch.ones(2))
    def forward(self, ids):
        x = self.norm(torch.tanh(self.one(self.embed(ids))))
        return self.head(self.drop(torch.tanh(self.two(x))))

def words(count, seed):
    ids = torch.randint(0, 11, (count, 4), generator=torch.Generator().manual_seed(seed))
    return list(zip(ids, ids.roll(1, 1)))

class Deadly(list):
    """Takes its time, and ends its process, on one device, once there is a checkpoint."""
    def __init__(self, samples, rank, folder):
        super().__init__(samples)
        self.deadly, self.folder = os.environ.get("RANK") == str(rank), folder
    def __getitem__(self, i):
        time.sleep(0.004)
        if self.deadly and glob.glob(self.folder + "/checkpoints/samples-*"):
            os.kill(os.getpid(), 9)
        return super().__getitem__(i)

def loss(output, target):
    return cross_entropy(output.flatten(0, 1), target.flatten())

def recipe():
    return ev.Recipe(
        model=Net().double(), dataset={data}, heldout=words(7, 2), loss=loss,
        optimizer=lambda p: torch.optim.{optimizer}, global_batch=6, {dropout}
        schedule=lambda seen: 1 / (1 + seen / 20), max_norm=1.0, {options}
    )
'''
ADAM = "AdamW(p, lr=0.05, weight_decay=0.01)"


def plan_of(*pipelines: tuple[int, int, tuple[Stage, ...]], schedule: str = "gpipe") -> Plan:
    made = tuple(Pipeline(samples=n, micro_batch=m, stages=stages) for n, m, stages in pipelines)
    return Plan(global_batch=sum(p.samples for p in made), pipelines=made, schedule=schedule)


FOUR = plan_of(
    (
        6,
        2,
        (
            stage("(root) embed", (A, 2)),
            stage("one norm", (B, 2)),
            stage("two", (C, 2)),
            stage("drop head", (D, 2)),
        ),
    ),
)
ONE = plan_of((6, 6, (stage("(root) embed one norm two drop head", (A, 6)),)))
TWO = plan_of(
    (4, 2, (stage("(root) embed one norm two drop head", (A, 2)),)),
    (2, 2, (stage("(root) embed one norm two drop head", (B, 2)),)),
)
THREE = plan_of(
    (4, 2, (stage("(root) embed one", (C, 2)), stage("norm two drop head", (B, 2)))),
    (2, 2, (stage("(root) embed one norm two", (A, 2)), stage("drop head", (C, 2)))),
)


def request_for(
    folder: Path,
    plan: Plan,
    *,
    steps: int,
    every: int | None = None,
    resume: Path | str | None = None,
    options: str = 'batch_norm="wave"',
    norm: str = "BatchNorm1d(4)",
    optimizer: str = ADAM,
    split_free: bool = True,
    data: str = "words(27, 1)",
    keep: int = 9,
    **wishes: Any,
) -> Request:
    """A run of the job under `plan` in `folder`, which is made."""
    folder.mkdir(exist_ok=True)
    text = SCRIPT.replace("{options}", options).replace("{optimizer}", optimizer)
    text = (
        text.replace("{data}", data)
        .replace("{norm}", norm)
        .replace("{dropout}", 'dropout="split-free",' if split_free else "")
    )
    return run_of(
        folder,
        text,
        plan,
        steps=steps,
        checkpoint=Rule(steps=every, keep=Keep(last=keep)) if every else None,
        resume=str(resume) if resume else None,
        **wishes,
    )


def losses(folder: Path) -> dict[int, float]:
    """The loss of each step of a run, by its number."""
    return {r.step: r.loss for r in read_metrics(folder / "metrics.jsonl").records if r.loss is not None}
