from types import SimpleNamespace

import pytest
import torch

from evener.core.fleet import Device
from evener.errors import UnknownNameError
from evener.probing.identity import devices_here, host_name, select, torch_device

NO_FILES = {}


class Accelerators:
    """Stands for torch.accelerator on a host with `count` devices of `type`."""

    def __init__(self, type_, count):
        self._type, self._count = type_, count

    def is_available(self):
        return self._count > 0

    def device_count(self):
        return self._count

    def current_accelerator(self):
        return SimpleNamespace(type=self._type)


def found(type_="cuda", properties=(), files=NO_FILES):
    module = SimpleNamespace(get_device_properties=lambda i: SimpleNamespace(**properties[i]))
    return devices_here(
        "lab1",
        accelerator=Accelerators(type_, len(properties)),
        module_of=lambda name: module,
        read=lambda path: files.get(path, ""),
    )


def test_accelerators_have_kind_identity_and_memory():
    card = {"name": "NVIDIA GeForce RTX 3060", "uuid": "1234-56", "total_memory": 12 * 2**30}
    gpu, cpu = found(properties=(card,))
    assert (gpu.name, gpu.kind, gpu.type, gpu.index) == ("lab1/gpu0", card["name"], "cuda", 0)
    assert gpu.hardware_id == "GPU-1234-56"
    assert gpu.memory_bytes.value == 12 * 2**30
    assert torch_device(gpu) == torch.device("cuda:0")
    assert cpu.name == "lab1/cpu"


def test_without_a_uuid_the_pci_address_identifies():
    card = {"name": "Card", "pci_domain_id": 0, "pci_bus_id": 0x3B, "pci_device_id": 0}
    assert found(properties=(card,))[0].hardware_id == "0000:3b:00"


def test_without_anything_the_identity_is_unknown():
    gpu = found("npu", properties=({},))[0]
    assert gpu.name == "lab1/npu0"
    assert gpu.hardware_id == ""
    assert gpu.memory_bytes is None


def test_the_cpu_is_told_apart_by_machine_and_threads():
    (one,) = found(files={"/etc/machine-id": "abc\n"})
    (other,) = found(files={"/etc/machine-id": "abd\n"})
    assert one.hardware_id.startswith("cpu-")
    assert one.hardware_id != other.hardware_id
    assert "abc" not in one.hardware_id
    assert one.threads == torch.get_num_threads()
    assert one.kind.endswith(f"({one.threads} thread{'s' if one.threads > 1 else ''})")


def test_a_container_has_no_more_memory_than_its_limit():
    limit = {"/sys/fs/cgroup/memory.max": "1000000\n"}
    assert found(files=limit)[0].memory_bytes.value == 1_000_000
    assert found(files={"/sys/fs/cgroup/memory.max": "max\n"})[0].memory_bytes.value > 1_000_000


def test_devices_are_named_as_people_name_them():
    devices = (
        Device(name="lab1/gpu0", kind="A", type="cuda", index=0),
        Device(name="lab1/gpu1", kind="A", type="cuda", index=1),
        Device(name="lab1/cpu", kind="C"),
    )

    def names(*wanted):
        return [d.name for d in select(devices, wanted)]

    assert names("cpu", "cuda:1") == ["lab1/cpu", "lab1/gpu1"]
    assert names("lab1/gpu1", "gpu0", "gpu1") == ["lab1/gpu1", "lab1/gpu0"]
    assert names("cuda") == ["lab1/gpu0", "lab1/gpu1"]
    with pytest.raises(UnknownNameError, match=r"'cuda:2'[\s\S]*lab1/gpu0 \(cuda:0\)"):
        names("cuda:2")


def test_a_host_has_a_name():
    assert host_name()
    assert "/" not in host_name()
