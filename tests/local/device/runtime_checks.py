"""What this runtime does with a device where only a device shows it, a function each: see `checks`."""

import copy
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from evener.core.fleet import Device, Fleet
from evener.runtime.batchnorm import replace_batchnorm, wave
from evener.runtime.buckets import GradientBuckets
from evener.runtime.channels.frames import Frame
from evener.runtime.channels.messages import layout_of, pack, unpack
from evener.runtime.hardware import HardwareDriver
from evener.runtime.problem import loss_on_cpu
from evener.runtime.ranks import Ranks
from evener.runtime.residing.flow import Flow
from evener.runtime.wire import GroupWire
from evener.session.site import Site
from tests.local.device.comparing import same


class Work:
    """A sum of a vendor's library: waiting for it holds up the device alone."""

    def wait(self) -> None:
        return


class Vendor:
    """A process group whose sums the device makes, after much other work; `asked` has what it was given."""

    def __init__(self) -> None:
        self.asked: list[torch.Tensor] = []

    def allreduce(self, tensors: list[torch.Tensor]) -> Work:
        self.asked += tensors
        _keep_busy(tensors[0].device)
        for tensor in tensors:
            tensor.mul_(2)
        return Work()


def _keep_busy(device: torch.device) -> None:
    side = 64 if device.type == "rehearsal" else 4096  # which computes on a CPU
    x = torch.ones(side, side, device=device)
    for _ in range(8):
        x = x @ x / side


def _is_at_rest(device: torch.device) -> bool:
    return torch.accelerator.current_stream(device).query()


def loss_in_host_memory(device: str) -> None:
    """The loss once read what the device had not copied yet, and was that of another memory's values."""
    torch.manual_seed(0)
    x, weight = torch.randn(128, 512), torch.randn(512, 512)
    target = torch.randint(0, 512, (128,))
    wanted = F.cross_entropy(x @ weight, target)
    far = (x.to(device) @ weight.to(device)).requires_grad_()
    loss = loss_on_cpu(nn.CrossEntropyLoss())(far, target)
    assert loss.device.type == "cpu"
    torch.testing.assert_close(loss, wanted, rtol=1e-3, atol=1e-3)
    loss.backward()
    assert far.grad is not None and far.grad.device.type == device


def waits_for_copies(device: str) -> None:
    """An action that fails waits for nothing, and its wait for parameters was then asked for too early."""
    flow = Flow(torch.device(device, 0))
    coming = flow.bring(flow.host(2**22, torch.float32).fill_(1.0))
    flow.await_(coming)
    assert flow.exposed_s() >= 0.0
    assert coming.tensor.sum().item() == 2**22
    assert flow.exposed_s() == 0.0


def sums_are_waited_for(device: str) -> None:
    """Who has summed tells the others that it has: the host once went on while the device was still at it."""
    place, vendor = torch.device(device, 0), Vendor()
    buffer = torch.ones(4, device=place)
    GroupWire(vendor).all_reduce(buffer, "step 0, bucket 0").wait()  # type: ignore[arg-type]
    assert _is_at_rest(place)
    same(buffer, torch.full((4,), 2.0))


def groups_connect_when_they_are_made(device: str) -> None:
    """In their first sums of a step devices could come to their groups in orders that wait for each other."""
    place, vendor = torch.device(device, 0), Vendor()
    cards = tuple(Device(name=f"lab/gpu{i}", kind="card", type="cuda", index=i) for i in (0, 1))
    site = Site(cards[0], place, HardwareDriver(place))
    wire = site.wire(Fleet(devices=cards), ("lab/gpu0", "lab/gpu1"), rehearse=False, group=vendor)  # type: ignore[arg-type]
    assert [t.device for t in vendor.asked] == [place]
    wire.all_reduce(torch.ones(2, device=place), "step 0, bucket 0").wait()
    assert len(vendor.asked) == 2
    others = tuple(Device(name=f"far/gpu{i}", kind="card", type="cuda", index=i) for i in (0, 1))
    every = Fleet(devices=(*cards, *others))
    site.wire(every, ("far/gpu0", "far/gpu1"), rehearse=False, group=vendor)  # type: ignore[arg-type]
    assert len(vendor.asked) == 2, "who is in no group has nothing to sum there"


def buckets_leave_without_a_wait(device: str) -> None:
    """What tells devices apart came from the host, and every bucket waited for the backward so far."""
    place = torch.device(device, 0)
    model = nn.Linear(4, 2, bias=False).to(place)
    found: list[Any] = []

    class Away:
        def all_reduce(self, buffer: torch.Tensor, key: str, *, exact_tail: int = 0) -> Work:
            found.append((buffer, _is_at_rest(place)))
            return Work()

    buckets = GradientBuckets([list(model.parameters())], Ranks(("lab/a", "lab/b"), "lab/b"), Away())
    buckets.begin(1.0)
    model(torch.ones(3, 4, device=place)).sum().backward()
    _keep_busy(place)
    buckets.launch_rest(0)
    ((buffer, at_rest),) = found
    assert not at_rest
    same(buffer, torch.tensor([3.0] * 8 + [0.0, 1.0, 1.0]))


def waves_are_summed_on_the_host(device: str) -> None:
    """Who passes has nothing on its device: it went by another library than the others, and all waited."""
    place = torch.device(device, 0)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3), nn.ReLU())
    far = copy.deepcopy(plain).to(place)
    replace_batchnorm(far)
    given: list[torch.Tensor] = []

    class Alone:
        def all_reduce(self, buffer: torch.Tensor, key: str, *, exact_tail: int = 0) -> Work:
            given.append(buffer)
            return Work()

    x = 3 + 2 * torch.randn(4, 2, 5, 5)
    turn, passed = wave(far, Alone()), wave(far, Alone())
    with turn:
        output = far(x.to(place))
    with turn:
        output.square().sum().backward()
    passed.pass_forward()
    passed.pass_backward()
    assert len(given) == 3 and {t.device.type for t in given} == {"cpu"}
    plain(x).square().sum().backward()
    near = dict(plain.named_parameters()) | dict(plain.named_buffers())
    for name, tensor in (dict(far.named_parameters()) | dict(far.named_buffers())).items():
        torch.testing.assert_close(tensor.detach().cpu(), near[name].detach(), rtol=1e-4, atol=1e-4)
        if tensor.grad is not None:
            torch.testing.assert_close(tensor.grad.cpu(), near[name].grad, rtol=1e-3, atol=1e-3)


def messages_are_pinned_for_devices_alone(device: str) -> None:
    """A CPU's process beside cards pinned what it was sent, for which it had to open a card of the others."""
    sent = (torch.arange(5.0), torch.ones(2, 3))
    header = unpack(pack("k of step 0", 0.0, layout_of(sent)), "lab/a")
    for pin in (False, True):
        frame = Frame(header, pin=pin)
        assert {memory.is_pinned() for memory in frame.tensors} == {pin}
        for memory, tensor in zip(frame.tensors, sent, strict=True):
            memory.copy_(tensor.flatten().view(torch.uint8))
        for arrived, tensor in zip(frame.finished(torch.device(device, 0)), sent, strict=True):
            same(arrived, tensor)
