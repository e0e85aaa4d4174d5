"""K16 and its kin: real processes are killed, stopped, cut off, asked to leave, and join; nothing is lost."""

import signal

import msgspec
import pytest
import torch

from evener.core.figures import Figure
from evener.core.fleet import Device, Fleet
from evener.errors import EvenerError, PeerLostError, RefusedError
from evener.session.launching.launch import launch
from evener.session.request import TOKEN_FILE
from tests.faults.jobs import NAMES, Job, error_of, in_a_row, request_for, signalled, split, steps_of
from tests.local.namespaces import Network, needs_root

pytestmark = pytest.mark.timeout(120)


def assumed(value: float) -> Figure:
    return Figure(value=value, source="assumed")


@pytest.mark.parametrize(("dtype", "bound"), [("double", 1e-12), ("float", 1e-6)])
def test_k16_a_process_that_exits_before_step_3_costs_nothing(tmp_path, dtype: str, bound: float) -> None:
    outcome = launch(request_for(tmp_path, split(5, 4, 3), steps=6, faults="leave lab/c at 3", dtype=dtype))
    assert error_of(outcome, 6, getattr(torch, {"double": "float64", "float": "float32"}[dtype])) <= bound
    assert [p.samples for p in outcome.plan.pipelines] == [7, 5]
    assert steps_of(outcome) == list(range(6))
    (told,) = (s for s in outcome.decisions if s.startswith("generation 2, "))
    assert (
        "before step 3: lab/c is lost (gone)" in told
        and "9 of 12 samples of step 3 are kept (lab/a 5, lab/b 4), the other 3 taken anew" in told
    )
    assert outcome.parameters_agree


@pytest.mark.parametrize("device", NAMES)
def test_a_process_killed_from_outside_the_leading_one_too(tmp_path, device: str) -> None:
    outcome = signalled(request_for(tmp_path, split(5, 4, 3), steps=16), device, signal.SIGKILL, 4)
    assert error_of(outcome, 16) <= 1e-12
    assert steps_of(outcome) == list(range(16))
    assert device not in outcome.plan.devices


def test_a_stopped_process_is_missed_within_a_second_and_comes_back(tmp_path) -> None:
    request = request_for(tmp_path, split(5, 4, 3), steps=120)
    outcome = signalled(request, "lab/c", signal.SIGSTOP, 3, back_s=1.6)
    assert error_of(outcome, 120) <= 1e-12
    told = [s for s in outcome.decisions if s.startswith("generation") and ", before step" in s]
    assert "lab/c is lost (silent for" in told[0] and "lab/c joins" in told[1]
    assert sorted(set(steps_of(outcome))) == list(range(120))


def test_a_device_asked_to_leave_hands_over_and_no_step_is_taken_twice(tmp_path) -> None:
    outcome = signalled(request_for(tmp_path, in_a_row("0 1", "2"), steps=24), "lab/b", signal.SIGTERM, 3)
    assert error_of(outcome, 24) <= 1e-12
    assert steps_of(outcome) == list(range(24))
    assert any("lab/b leaves as it was asked to" in s for s in outcome.decisions)


@pytest.mark.parametrize("device", ["lab/a", "lab/b"])
def test_a_rehearsed_device_hands_over_what_it_alone_holds(tmp_path, device: str) -> None:
    """What it sends takes the seconds of its links, which the fleet of those that stay does not name."""
    request = request_for(tmp_path, in_a_row("0 1", "2"), steps=24)
    paced = Device(
        name="lab/a",
        kind="paced",
        threads=1,
        flops={"float64": assumed(1e9)},
        bytes_per_s=assumed(1e9),
        launch_s=assumed(1e-5),
    )
    devices = tuple(msgspec.structs.replace(paced, name=d.name) for d in request.fleet.devices)
    request = msgspec.structs.replace(request, rehearse=True, fleet=Fleet(devices=devices))
    outcome = signalled(request, device, signal.SIGTERM, 3)
    assert error_of(outcome, 24) <= 1e-12
    assert steps_of(outcome) == list(range(24))
    assert any(f"{device} leaves as it was asked to" in s for s in outcome.decisions)


@pytest.mark.parametrize("device", ["lab/a", "lab/b", "lab/c"])
def test_what_only_the_lost_device_held_comes_from_its_neighbour(tmp_path, device: str) -> None:
    plan = in_a_row("0", "1", "2")
    outcome = launch(request_for(tmp_path, plan, steps=12, faults=f"leave {device} at 7.5"))
    assert error_of(outcome, 12) <= 1e-12
    told = next(s for s in outcome.decisions if s.startswith("generation 2, "))
    assert ("back to the copies of before step 6" in told) == (device != "lab/b")  # it holds no parameter


def test_a_device_that_is_cut_off_does_not_go_on_alone(tmp_path) -> None:
    request = request_for(tmp_path, split(6, 6), steps=100, faults="cut lab/a|lab/b at 3 for 3s")
    outcome = launch(request)
    assert error_of(outcome, 100) <= 1e-12
    assert any("lab/b is lost (silent for" in s for s in outcome.decisions)


def test_a_device_joins_from_the_step_that_the_script_says_and_holds_the_same(tmp_path) -> None:
    outcome = launch(
        request_for(tmp_path, split(6, 6), steps=30, faults="join lab/c at 5; leave lab/a at 15")
    )
    assert error_of(outcome, 30) <= 1e-12
    assert steps_of(outcome) == list(range(30))
    assert any("lab/c joins" in s for s in outcome.decisions)
    assert outcome.plan.devices == ("lab/b", "lab/c") and outcome.parameters_agree


def test_without_elastic_a_lost_device_ends_the_run(tmp_path) -> None:
    request = msgspec.structs.replace(request_for(tmp_path, split(6, 6), steps=200), elastic=False)
    with pytest.raises(PeerLostError, match="lab/b was ended by SIGKILL"):
        signalled(request, "lab/b", signal.SIGKILL, 2)


def test_when_all_copies_are_gone_the_error_says_what_is_missing(tmp_path) -> None:
    request = request_for(tmp_path, in_a_row("0 1", "2"), steps=12, faults="leave lab/b at 3")
    with pytest.raises(EvenerError, match="only lost devices held 2"):
        launch(msgspec.structs.replace(request, snapshot_every=0))


@needs_root
def test_a_device_of_another_host_joins_and_its_cable_is_cut(tmp_path) -> None:
    with Network(hosts=2, switches=1) as network, Job(tmp_path, network) as job:
        guest = job.join(2)
        assert job.says("joins", within_s=60), job.told_so_far
        assert job.takes_steps(3)
        network.kill(0)
        assert job.says("is lost (silent for", within_s=10), job.told_so_far
        assert job.takes_steps(3)
        assert guest.wait(60) != 0  # it never went on alone


def test_who_may_not_join_is_told_why_and_the_job_goes_on(tmp_path) -> None:
    with Job(tmp_path, None) as job:
        wrong = tmp_path / "wrong-token"
        wrong.write_text("not the token")
        other = tmp_path / "other.py"
        text = job.script.read_text()
        other.write_text(text.replace("nn.Linear(5, 7)", "nn.Linear(5, 9)").replace("(7, 3)", "(9, 3)"))
        strangers = [job.join(1, token=wrong), job.join(1, script=other)]
        assert [s.wait(60) for s in strangers] == [RefusedError.exit_code] * 2
        first, second = (s.stderr.read() for s in strangers)
        assert "the token is not that of this job" in first
        assert "another script" in second and "another model" in second
        assert job.says("refused a device at 127.0.0.1", within_s=5)
        assert (job.folder / TOKEN_FILE).stat().st_mode & 0o077 == 0
        assert job.takes_steps(3)
