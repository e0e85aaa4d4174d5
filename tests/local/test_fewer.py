"""Fewer exchanges between hosts, against plain PyTorch loops over the same shards: no evener in those."""

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file
from torch import nn

from evener.cli.verify import verdict_of
from evener.core.fewer import Fewer, fewer_in
from evener.core.order import epoch_order, global_batch_at
from evener.core.plan import Pipeline, Plan, Reduction, Share, Stage
from evener.core.split import apportion
from evener.errors import EvenerError, NonFiniteError, PlanMismatchError, UsageError
from evener.runtime.checkpoints.folder import checkpoints_in
from evener.session.checkpoints.save_rule import Keep, rule_of
from evener.session.checkpoints.tensors import PARAMETER_FILE
from evener.session.exactness.verify import verify
from evener.session.journal import Outcome
from evener.session.launching.launch import launch
from evener.session.request import Request
from tests.local.runs import cpus, run_of
from tests.reference import relative_error

A, B, C = "h1/a", "h1/b", "h2/c"
SAMPLES, BATCH = 22, 8
SCRIPT = """
import torch, evener as ev
from torch import nn

def recipe():
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(22, 5, generator=generator), torch.randint(0, 3, (22,), generator=generator)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    {change}
    return ev.Recipe(
        model=model, dataset=list(zip(x, y)), heldout=list(zip(x, y)), global_batch=8,
        loss=nn.CrossEntropyLoss(), optimizer={optimizer}, {options}
    )
"""
SGD = "lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.9)"
ADAM = "lambda p: torch.optim.AdamW(p, lr=0.02)"
OPTIMIZERS: dict[str, Callable] = {
    SGD: lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.9),
    ADAM: lambda p: torch.optim.AdamW(p, lr=0.02),
}
SHARES = {A: 3, B: 2, C: 3}
LANES = (
    Reduction(devices=(A, B), transport="gloo"),
    Reduction(devices=(A, C), transport="gloo", part=0.7),
    Reduction(devices=(B, C), transport="gloo", part=0.3),
)


def plan_with(fewer: Fewer | None, shares: dict[str, int] = SHARES, times: int = 1) -> Plan:
    def pipeline(name: str, samples: int) -> Pipeline:
        stage = Stage(layers=("0", "1", "2"), shares=(Share(devices=(name,), samples=2),))
        return Pipeline(samples=samples, micro_batch=2, stages=(stage,))

    pipelines = tuple(pipeline(d, n * times) for d, n in shares.items())
    return Plan(global_batch=BATCH * times, pipelines=pipelines, reductions=LANES, fewer=fewer)


def request_for(
    folder: Path, plan: Plan, steps: int, *, optimizer: str = SGD, options: str = "", change: str = "", **more
) -> Request:
    text = SCRIPT.replace("{optimizer}", optimizer).replace("{options}", options).replace("{change}", change)
    more |= {"dtype": "float64", "preflight": False}  # all of these hosts are this one
    return run_of(folder, text, plan, steps=steps, fleet=cpus((A, B, C)), **more)


def trained(request: Request) -> tuple[Outcome, list[torch.Tensor]]:
    outcome = launch(request)
    assert outcome is not None and outcome.parameters_agree
    tensors = load_file(Path(request.run_dir) / PARAMETER_FILE)
    return outcome, [tensors[n] for n in ("0.weight", "0.bias", "2.weight", "2.bias")]


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(SAMPLES, 5, generator=generator), torch.randint(0, 3, (SAMPLES,), generator=generator)
    return x.double(), y


def model_of_the_script() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def batches(steps: int, batch: int = BATCH) -> list[list[int]]:
    """Indices of every global batch, in the order of the job's seed."""
    found, seen = [], 0
    for _ in range(steps):
        at = global_batch_at(seen, SAMPLES, batch)
        found.append(epoch_order(SAMPLES, at.epoch, 0)[at.start : at.stop].tolist())
        seen += at.samples
    return found


def shards(indices: list[int], parts: dict[str, int]) -> tuple[list[int], list[int]]:
    """Those of host h1 and of h2, in the plan's proportion: 8 samples as 3 + 2 and 3, 6 as 2 + 2 and 2."""
    sizes = apportion(len(indices), list(parts.values()))
    first = sum(sizes[:2])
    return indices[:first], indices[first:]


def mean_loss(model: nn.Module, indices: list[int]) -> torch.Tensor:
    x, y = data()
    return nn.functional.cross_entropy(model(x[indices]), y[indices])


def plain_local(
    steps: int, every: int, rate: float, momentum: float, optimizer: str, parts: dict[str, int] = SHARES
) -> list[torch.Tensor]:
    """DiLoCo in plain PyTorch: workers, an outer Nesterov SGD on the mean change by samples."""
    start = model_of_the_script()
    workers = [copy.deepcopy(start) for _ in range(2)]
    inner = [OPTIMIZERS[optimizer](w.parameters()) for w in workers]
    outer = torch.optim.SGD(start.parameters(), lr=rate, momentum=momentum, nesterov=momentum > 0)
    work = [0, 0]
    for step, indices in enumerate(batches(steps)):
        for i, own in enumerate(shards(indices, parts)):
            if own:
                inner[i].zero_grad()
                mean_loss(workers[i], own).backward()
                inner[i].step()
                work[i] += len(own)
        if (step + 1) % every == 0 or step + 1 == steps:
            for p, *own in zip(start.parameters(), *(w.parameters() for w in workers), strict=True):
                p.grad = sum(n * (p.detach() - q.detach()) for n, q in zip(work, own, strict=True)) / sum(
                    work
                )
            outer.step()
            for worker in workers:
                worker.load_state_dict(start.state_dict())
            work = [0, 0]
    return [p.detach() for p in start.parameters()]


def plain_delayed(steps: int, optimizer: str) -> list[torch.Tensor]:
    """Each of two hosts moves by its own samples of a batch and the other's of the batch before."""
    start = model_of_the_script()
    hosts = [copy.deepcopy(start) for _ in range(2)]
    movers = [OPTIMIZERS[optimizer](h.parameters()) for h in hosts]
    before: list[list[torch.Tensor]] = [[], []]
    counted, work = [0, 0], [0, 0]
    for indices in batches(steps):
        own, sizes = [], []
        for host, part in zip(hosts, shards(indices, SHARES), strict=True):
            host.zero_grad()
            (mean_loss(host, part) * len(part)).backward()
            own.append([p.grad.clone() for p in host.parameters()])
            sizes.append(len(part))
        for i, host in enumerate(hosts):
            other = 1 - i
            whole = sizes[i] + counted[other]
            late = before[other] or [torch.zeros_like(g) for g in own[i]]
            for p, mine, theirs in zip(host.parameters(), own[i], late, strict=True):
                p.grad = (mine + theirs) / whole
            movers[i].step()
            work[i] += sizes[i]
        before, counted = own, sizes
    pairs = zip(*(h.parameters() for h in hosts), strict=True)
    return [(work[0] * p.detach() + work[1] * q.detach()) / sum(work) for p, q in pairs]


@pytest.mark.parametrize("optimizer", [SGD, ADAM], ids=["sgd", "adamw"])
def test_local_steps_are_a_plain_loop_of_diloco(tmp_path: Path, optimizer: str) -> None:
    """7 steps in rounds of 3: the last outer step is of one; the third batch is the rest of the epoch."""
    plan = plan_with(Fewer(how="local", every=3, rate=0.7, momentum=0.9))
    outcome, got = trained(request_for(tmp_path, plan, 7, optimizer=optimizer))
    assert relative_error(got, plain_local(7, 3, 0.7, 0.9, optimizer)) <= 1e-12
    assert any("between hosts: 3 exchanges in 7 steps" in d for d in outcome.decisions)
    assert any("the job ends when a device is lost" in d for d in outcome.decisions)
    assert any("hosts train by themselves for 3 steps" in s for s in outcome.plan.inexact)


@pytest.mark.parametrize("optimizer", [SGD, ADAM], ids=["sgd", "adamw"])
def test_delayed_is_a_plain_loop_with_the_other_hosts_gradient_one_step_late(
    tmp_path: Path, optimizer: str
) -> None:
    plan = plan_with(Fewer(how="delayed"))
    outcome, got = trained(request_for(tmp_path, plan, 6, optimizer=optimizer))
    assert relative_error(got, plain_delayed(6, optimizer)) <= 1e-12
    assert any("hosts exchange gradients while the next step computes" in s for s in outcome.plan.inexact)
    assert outcome.heldout_loss is not None


def test_accumulate_is_one_step_of_so_many_batches(tmp_path: Path) -> None:
    """4 steps of 8 (8 8 6, 8) are 3 of 16 (16 6, 16): the run ends 8 samples later, and says so."""
    plan = plan_with(Fewer(how="accumulate", every=2), times=2)
    outcome, got = trained(request_for(tmp_path, plan, 4))
    assert any("took 8 samples more than asked for" in d for d in outcome.decisions)
    model = model_of_the_script()
    optimizer = OPTIMIZERS[SGD](model.parameters())
    for indices in batches(3, 2 * BATCH):
        optimizer.zero_grad()
        mean_loss(model, indices).backward()
        optimizer.step()
    assert relative_error(got, [p.detach() for p in model.parameters()]) <= 1e-12


def test_rounds_longer_than_the_run_end_with_an_outer_step(tmp_path: Path) -> None:
    plan = plan_with(Fewer(how="local", every=500, rate=1.0, momentum=0.0))
    outcome, got = trained(request_for(tmp_path, plan, 3))
    assert relative_error(got, plain_local(3, 500, 1.0, 0.0, SGD)) <= 1e-12
    assert any("between hosts: 1 exchange in 3 steps" in d for d in outcome.decisions)


def test_a_host_without_samples_goes_along(tmp_path: Path) -> None:
    parts = {A: 5, B: 3, C: 0}
    plan = plan_with(Fewer(how="local", every=2, rate=0.7, momentum=0.9), shares=parts)
    _, got = trained(request_for(tmp_path, plan, 4))
    assert relative_error(got, plain_local(4, 2, 0.7, 0.9, SGD, parts)) <= 1e-12


def test_a_group_whose_weights_are_nan_is_left_out_and_goes_on_from_the_others(tmp_path: Path) -> None:
    """From step 1 on h2's gradients are infinite; its part of rounds does not count, and all end alike."""
    change = (
        "import os; seen = []\n"
        "    if os.environ.get('RANK') == '2':\n"
        "        model[0].weight.register_hook(lambda g: seen.append(1) or (g if len(seen) < 4 else g / 0.0))"
    )
    plan = plan_with(Fewer(how="local", every=2, rate=1.0, momentum=0.0))
    request = request_for(tmp_path, plan, 4, change=change, options='on_non_finite="skip"')
    outcome, got = trained(request)
    assert all(torch.isfinite(t).all() for t in got)
    assert any("the weights of the group of h2/c are NaN or infinite" in d for d in outcome.decisions)


@pytest.mark.parametrize("how", ["local:2", "delayed"])
def test_nan_ends_the_run_where_it_is_not_to_be_skipped(tmp_path: Path, how: str) -> None:
    change = (
        "import os\n    if os.environ.get('RANK') == '2':\n"
        "        model[0].weight.register_hook(lambda g: g / 0.0)"
    )
    (fewer,) = fewer_in((how,))
    with pytest.raises(NonFiniteError, match="NaN or infinite"):
        launch(request_for(tmp_path, plan_with(fewer), 4, change=change))


def test_a_skipped_step_of_one_host_leaves_its_samples_out_of_a_delayed_exchange(tmp_path: Path) -> None:
    change = (
        "import os; seen = []\n"
        "    if os.environ.get('RANK') == '2':\n"
        "        model[0].weight.register_hook(lambda g: seen.append(1) or g / (len(seen) != 3))"
    )
    request = request_for(
        tmp_path, plan_with(Fewer(how="delayed")), 5, change=change, options='on_non_finite="skip"'
    )
    _, got = trained(request)
    assert all(torch.isfinite(t).all() for t in got)


@pytest.mark.parametrize("how", ["local:4:0.7:0.9", "delayed"])
def test_a_run_that_is_taken_up_ends_as_the_undisturbed_one(tmp_path: Path, how: str) -> None:
    """Saved after step 3, in the middle of a round, or with gradients on their way; Adam's state by group."""
    (fewer,) = fewer_in((how,))
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir(), second.mkdir()
    saves = rule_of(3, Keep())
    whole = request_for(first, plan_with(fewer), 7, optimizer=ADAM, checkpoint=saves)
    outcome, want = trained(whole)
    taken = next(c for c in checkpoints_in(first) if c.manifest.position.step == 3)
    again = request_for(second, plan_with(fewer), 7, optimizer=ADAM, resume=str(taken.path))
    outcome, got = trained(again)
    assert not any("from here on" in d for d in outcome.decisions)
    assert relative_error(got, want) <= 1e-14


def test_a_checkpoint_of_one_group_is_taken_up_openly(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir(), second.mkdir()
    trained(request_for(first, plan_with(None), 3, checkpoint=rule_of(3, Keep())))
    plan = plan_with(Fewer(how="local", every=2, rate=1.0, momentum=0.0))
    outcome, _ = trained(request_for(second, plan, 5, resume=str(first)))
    assert any("hosts take steps by themselves (local:2:1:0) from here on" in d for d in outcome.decisions)


THREE = (Reduction(devices=(A, B, C), transport="gloo", part=1.0),)


@pytest.mark.parametrize(
    ("before", "after", "lanes"),
    [("delayed", "local:2", LANES), ("local:4", "delayed", LANES), ("local:4", "local:4", THREE)],
    ids=["another way", "the other way", "other groups"],
)
def test_where_groups_cannot_go_on_as_they_were_all_begin_alike(
    tmp_path: Path, before: str, after: str, lanes: tuple[Reduction, ...]
) -> None:
    """Saved where the weights of hosts differ: those of the first are what all go on from."""
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir(), second.mkdir()
    (old,), (new,) = fewer_in((before,)), fewer_in((after,))
    trained(request_for(first, plan_with(old), 5, checkpoint=rule_of(3, Keep())))
    taken = next(c for c in checkpoints_in(first) if c.manifest.position.step == 3)
    plan = replace(plan_with(new), reductions=lanes)
    outcome, got = trained(request_for(second, plan, 7, resume=str(taken.path)))
    assert any("other groups or another way" in d for d in outcome.decisions)
    assert all(torch.isfinite(t).all() for t in got)


@pytest.mark.parametrize("how", ["local:4", "delayed"])
def test_hosts_by_themselves_do_not_save_by_the_clock(tmp_path: Path, how: str) -> None:
    (fewer,) = fewer_in((how,))
    with pytest.raises(UsageError, match="cannot agree by the clock"):
        launch(request_for(tmp_path, plan_with(fewer), 2, checkpoint=rule_of("90s", Keep())))


def test_what_does_not_go_together_is_refused_with_its_name(tmp_path: Path) -> None:
    plan = plan_with(Fewer(how="local", every=2))
    with pytest.raises(UsageError, match="stealing"):
        launch(request_for(tmp_path, replace(plan, steal=True), 2))
    ringed = replace(plan, reductions=())
    with pytest.raises(PlanMismatchError, match="not between groups"):
        launch(request_for(tmp_path, ringed, 2))


def test_a_group_member_that_is_lost_ends_the_job_with_a_message(tmp_path: Path) -> None:
    change = (
        "import os\n    if os.environ.get('RANK') == '1':\n"
        "        seen = []\n"
        "        model.register_forward_hook(lambda *_: seen.append(1) or len(seen) > 3 and os._exit(7))"
    )
    plan = plan_with(Fewer(how="local", every=3))
    with pytest.raises(EvenerError, match="h1/b"):
        launch(request_for(tmp_path, plan, 6, change=change, evaluate=False))


def test_a_recipe_that_lets_nobody_join_is_not_told_how(tmp_path: Path) -> None:
    """That it does is known to the devices, which have the recipe, and not to who starts them.

    tests/faults/test_joined.py reads how from a recipe that lets others join.
    """
    request = request_for(tmp_path, plan_with(None), 1, options='fewer=("local:2",)')
    train = [sys.executable, "-m", "evener.cli.main", "train", str(request.script), "--steps", "1"]
    ran = subprocess.run(
        [*train, "--devices", "cpu", "--run-dir", str(tmp_path / "told"), "--no-heldout"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert "process ids: " in ran.stderr and "--join" not in ran.stderr


@pytest.mark.parametrize("how", ["local:2:0.7:0.9", "delayed", "accumulate:2"])
def test_verify_holds_it_against_a_plain_loop_that_does_the_same_and_prints_the_deviation(
    tmp_path: Path, how: str
) -> None:
    (fewer,) = fewer_in((how,))
    times = fewer.every or 1 if how.startswith("accumulate") else 1
    change = 'model.register_buffer("seen", torch.zeros(1))'
    request = request_for(tmp_path, plan_with(fewer, times=times), 5, optimizer=ADAM, change=change)
    found = verify(request)
    assert any("buffers" in note for note in found.notes) == fewer.parts_hosts
    assert found.as_planned and not found.exact, found
    assert found.gradient_error_float64 <= 1e-12 and found.parameter_error_float64 <= 1e-12
    assert found.deviation is not None and 1e-3 < found.deviation < 2
    assert "in the place of one sum a step" in verdict_of(found)


def test_what_goes_between_hosts_may_be_compressed_as_well(tmp_path: Path) -> None:
    plan = plan_with(Fewer(how="local", every=2))
    small = tuple(replace(r, compression="int8") if r.part else r for r in plan.reductions)
    request = request_for(tmp_path, replace(plan, reductions=small), 6)
    outcome, got = trained(replace(request, dtype="float32"))
    assert 1e-6 < relative_error(got, plain_local(6, 2, 1.0, 0.0, SGD)) < 0.02
    (told,) = [d for d in outcome.decisions if "between hosts: 3 exchanges" in d]
    assert "0.0004023 MB; a sum of all bits every step would be 0.003168 MB" in told
