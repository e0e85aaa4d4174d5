"""The programs that ask torch and NVML, with libraries that answer as the real ones do."""

import json
import sys
from types import SimpleNamespace

import pytest

from evener.probing import ask_nvml, ask_torch, cards


def told(capsys) -> list[dict]:
    return cards.lines(capsys.readouterr().out)


class Refused(Exception):
    """As NVML raises for what a card does not support."""


def nvml(**changed) -> SimpleNamespace:
    """NVML on a host with an A100 in two slices and a card that is lost."""

    def handle(index):
        if index == 1:
            raise Refused("GPU is lost")
        return "A100"

    def part(device, index):
        if index > 1:
            raise Refused("Not Found")
        return f"slice{index}"

    def of_whole(value):
        def get(device, *_):
            if device != "A100":
                raise Refused("Not Supported")
            return value

        return get

    library = {
        "nvmlInit": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: b"580.95.05",
        "nvmlSystemGetCudaDriverVersion_v2": lambda: 13000,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": handle,
        "nvmlDeviceGetName": lambda d: "NVIDIA A100" + ("" if d == "A100" else " MIG 3g.40gb"),
        "nvmlDeviceGetUUID": lambda d: f"GPU-{d}" if d == "A100" else f"MIG-{d}",
        "nvmlDeviceGetPciInfo": of_whole(SimpleNamespace(busId=b"00000000:3B:00.0")),
        "nvmlDeviceGetCudaComputeCapability": lambda d: (8, 0),
        "nvmlDeviceGetMemoryInfo": lambda d: SimpleNamespace(total=80, free=79),
        "nvmlDeviceGetMigMode": of_whole((1, 1)),
        "nvmlDeviceGetMaxMigDeviceCount": lambda d: 7,
        "nvmlDeviceGetMigDeviceHandleByIndex": part,
        "nvmlDeviceGetComputeMode": of_whole(0),
        "nvmlDeviceGetClockInfo": of_whole(1410),
        "nvmlDeviceGetMaxClockInfo": of_whole(1410),
        "nvmlDeviceGetEnforcedPowerLimit": of_whole(300000),
        "nvmlDeviceGetPowerManagementDefaultLimit": of_whole(400000),
        "nvmlDeviceGetTemperature": of_whole(88),
        "nvmlDeviceGetCurrentClocksThrottleReasons": of_whole(0x4 | 0x40),
        "nvmlDeviceGetCurrPcieLinkWidth": of_whole(16),
        "nvmlDeviceGetMaxPcieLinkWidth": of_whole(16),
    }
    return SimpleNamespace(**library | changed)


def test_nvml_tells_cards_slices_and_what_is_lost(monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml())
    ask_nvml.main()
    head, *rest = told(capsys)
    assert (head["library"], head["cuda"]) == ("580.95.05", "13.0")
    (a100, one, two, lost), wrong = cards.from_nvml(rest)
    assert wrong == []
    assert (a100.hardware_id, a100.bus_id, a100.arch, a100.mig) == ("GPU-A100", "0000:3b:00.0", "sm_80", True)
    assert (a100.power_limit_w, a100.default_power_limit_w, a100.throttle) == (300, 400, ("power", "heat"))
    assert (a100.compute_mode, a100.temperature_c, a100.smi_index) == ("default", 88, 0)
    assert [c.hardware_id for c in (one, two)] == ["MIG-slice0", "MIG-slice1"]
    assert one.parent == "GPU-A100" and one.power_limit_w is None and one.compute_mode is None
    assert (lost.smi_index, lost.error) == (1, "Refused: GPU is lost")


def test_a_library_without_its_newer_functions_still_tells(monkeypatch, capsys) -> None:
    old = nvml()
    for name in (
        "nvmlSystemGetCudaDriverVersion_v2",
        "nvmlDeviceGetMigMode",
        "nvmlDeviceGetMaxMigDeviceCount",
    ):
        delattr(old, name)
    monkeypatch.setitem(sys.modules, "pynvml", old)
    ask_nvml.main()
    head, *rest = told(capsys)
    assert head["cuda"] == "" and len(rest) == 2 and rest[0]["mig"] is None


def test_nvml_that_does_not_start(monkeypatch, capsys) -> None:
    def refuse():
        raise Refused("Driver/library version mismatch")

    monkeypatch.setitem(sys.modules, "pynvml", nvml(nvmlInit=refuse))
    ask_nvml.main()
    (head,) = told(capsys)
    assert head["error"] == "Refused: Driver/library version mismatch" and head["missing"] is False


def torch(available: bool = True, **changed) -> SimpleNamespace:
    """torch built for CUDA, with one card."""
    properties = SimpleNamespace(
        name="NVIDIA L4",
        major=8,
        minor=9,
        total_memory=24,
        uuid="abc",
        pci_domain_id=0,
        pci_bus_id=0x3B,
        pci_device_id=0,
        is_integrated=0,
    )

    def zeros(*_, device):
        raise RuntimeError("first line\nThe NVIDIA driver on your system is too old")

    library = {
        "__version__": "2.13.0+cu126",
        "version": SimpleNamespace(cuda="12.6", hip=None),
        "accelerator": SimpleNamespace(
            is_available=lambda: available,
            device_count=lambda: 1,
            current_accelerator=lambda: SimpleNamespace(type="cuda"),
        ),
        "get_device_module": lambda kind: SimpleNamespace(get_device_properties=lambda i: properties),
        "_C": SimpleNamespace(_cuda_getArchFlags=lambda: "sm_80 sm_86"),
        "cuda": SimpleNamespace(nccl=SimpleNamespace(version=lambda: (2, 29, 7))),
        "get_num_threads": lambda: 4,
        "zeros": zeros,
    }
    return SimpleNamespace(**library | changed)


def test_torch_tells_its_build_and_its_devices(monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch())
    ask_torch.main(measure=False)
    build, devices = told(capsys)
    assert (build["archs"], build["nccl"], build["threads"]) == (["sm_80", "sm_86"], "2.29.7", 4)
    (device,) = devices["devices"]
    assert (device["arch"], device["bus_id"], device["uuid"], device["integrated"]) == (
        "sm_89",
        "0000:3b:00.0",
        "abc",
        None,
    )


def test_torch_without_a_device_tells_why(monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch(available=False))
    ask_torch.main(measure=False)
    assert told(capsys)[1]["error"] == "RuntimeError: The NVIDIA driver on your system is too old"


def test_an_amd_device_has_its_own_name_of_architecture(monkeypatch, capsys) -> None:
    card = SimpleNamespace(
        name="AMD Radeon RX 7900 XTX", major=11, minor=0, gcnArchName="gfx1100:sramecc-:xnack-"
    )
    amd = torch(
        version=SimpleNamespace(cuda=None, hip="7.2"),
        get_device_module=lambda kind: SimpleNamespace(get_device_properties=lambda i: card),
    )
    monkeypatch.setitem(sys.modules, "torch", amd)
    ask_torch.main(measure=False)
    assert told(capsys)[1]["devices"][0]["arch"] == "gfx1100"


@pytest.mark.parametrize("words", ["", "one", "one\n\ntwo\n"])
def test_an_error_is_one_line(words) -> None:
    line = ask_torch.last_line(ValueError(words))
    assert "\n" not in line and line.startswith("ValueError: ")
    assert json.loads(json.dumps(line)) == line
