import torch
from torch import nn

from evener.core.fleet import Device, Fleet
from evener.session.members.identity import Identity, identity_of
from evener.session.recipe import Recipe
from evener.session.request import Request


def identity(script, samples, hidden: int = 4) -> Identity:
    request = Request(
        fleet=Fleet(devices=(Device(name="lab/a", kind="cpu"),)), run_dir="unused", script=str(script)
    )
    recipe = Recipe(
        model=nn.Sequential(nn.Linear(2, hidden), nn.Linear(hidden, 1)),
        dataset=samples,
        loss=nn.MSELoss(),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        global_batch=2,
    )
    return identity_of(request, recipe)


def test_the_same_job_is_the_same_and_everything_that_differs_is_named(tmp_path) -> None:
    script, other = tmp_path / "a.py", tmp_path / "b.py"
    script.write_text("one")
    other.write_text("two")
    samples = [(torch.full((2,), float(i)), {"y": torch.zeros(1), "name": "x"}) for i in range(5)]
    job = identity(script, samples)
    assert job.differs(identity(script, list(samples))) == ""
    changed = [*samples[:-1], (torch.full((2,), 4.5), samples[-1][1])]
    assert job.differs(identity(script, changed)).startswith("other data")
    told = job.differs(identity(other, samples[:-1], hidden=5))
    assert (
        "another script" in told and "another model" in told and "another number of samples: 4 here 5" in told
    )
