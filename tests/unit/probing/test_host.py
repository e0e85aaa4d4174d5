"""`look` on hosts where things are missing, broken or silent; what fails in strange ways is run for real."""

import json
import os
import stat
import sys
from pathlib import Path

import pytest

from evener.core.files import decode, encode
from evener.core.host import HostFacts
from evener.diagnosis.findings import findings
from evener.probing import host
from evener.probing.asking import Answer, ask


def lines(*told: dict) -> str:
    return "".join(f"EVENER {json.dumps(t)}\n" for t in told)


def answers(**by_program: Answer):
    """Stands for programs, by the end of their names with _ for -."""

    def asked(command, timeout_s):
        for name, answer in by_program.items():
            if any(part.replace("-", "_").endswith(name) for part in command):
                return answer
        return Answer(failure=f"{command[0]}: No such file or directory")

    return asked


BUILD = {"stage": "build", "version": "2.13.0+cu126", "cuda": "12.6", "archs": ["sm_86"], "nccl": "2.29.7"}


def seen(ask, read=lambda p: "", names=lambda p: []) -> HostFacts:
    facts = host.look(host="lab1", ask=ask, read=read, names=names)
    assert decode(encode(facts), HostFacts, "facts") == facts  # it is a valid file whatever happened
    assert findings(facts)  # and can be judged
    return facts


def codes(facts: HostFacts) -> set[str]:
    return {f.code for f in findings(facts) if f.code.startswith("DR1")}


def test_a_card_is_put_together_from_all_witnesses() -> None:
    nvml = lines(
        {"stage": "nvml", "library": "550.54.15", "cuda": "12.4"},
        {
            "stage": "card",
            "smi_index": 0,
            "kind": "NVIDIA RTX A4000",
            "hardware_id": "GPU-1",
            "arch": "sm_86",
        },
    )
    torch = lines(
        BUILD,
        {
            "stage": "devices",
            "devices": [{"index": 0, "type": "cuda", "name": "NVIDIA RTX A4000", "uuid": "1"}],
        },
        {"stage": "rates", "index": 0, "rates": {"float32": 1e13}, "errors": {}},
        {"stage": "rates", "index": None, "rates": {"float32": 1e11}, "errors": {}},
    )
    facts = seen(answers(ask_torch=Answer(text=torch), ask_nvml=Answer(text=nvml)))
    (card,) = facts.cards
    assert (card.torch_index, card.dtypes, facts.cpu.dtypes) == (0, {"float32": 1e13}, {"float32": 1e11})
    assert (facts.nvidia.library, facts.nvidia.cuda, facts.torch.nccl) == ("550.54.15", "12.4", "2.29.7")
    assert codes(facts) == {"DR100"}


def test_a_host_with_nothing() -> None:
    facts = seen(answers())
    assert facts.nvidia is None and facts.cards == () and facts.torch.error
    assert "DR119" in codes(facts)


def test_torch_that_is_not_installed() -> None:
    missing = lines({"stage": "build", "error": "ModuleNotFoundError: No module named 'torch'"})
    facts = seen(answers(ask_torch=Answer(text=missing)))
    assert facts.torch is None and codes(facts) == {"DR120"}


def test_a_start_of_cuda_that_hangs_is_told() -> None:
    hung = Answer(text=lines(BUILD), failure="did not answer within 90 s")
    l4 = {"stage": "card", "smi_index": 0, "kind": "NVIDIA L4"}
    nvml = lines({"stage": "nvml", "library": "550.54.15"}, l4)
    facts = seen(answers(ask_torch=hung, ask_nvml=Answer(text=nvml)))
    assert facts.torch.version == "2.13.0+cu126"
    (finding,) = [f for f in findings(facts) if f.code == "DR122"]
    assert "did not answer within 90 s" in finding.evidence


def test_a_card_on_the_bus_without_any_driver() -> None:
    texts = {"vendor": "0x10de\n", "class": "0x030000\n", "device": "0x1c03\n", "modules": "nouveau 1 0\n"}
    facts = seen(
        answers(ask_torch=Answer(text=lines(BUILD | {"cuda": None, "version": "2.13.0+cpu"}))),
        read=lambda p: texts.get(p.rpartition("/")[2], ""),
        names=lambda p: ["0000:01:00.0"] if p.endswith("pci/devices") else [],
    )
    assert facts.cards[0].kind == "NVIDIA 10de:1c03"
    (finding,) = [f for f in findings(facts) if f.code == "DR107"]
    assert "nouveau" in finding.what


def test_half_a_driver_answers_through_nvidia_smi_alone() -> None:
    row = (
        "0, GPU-aaaa, NVIDIA L4, 00000000:07:00.0, 8.9, 23034, 22000, [N/A], Default, 210, 2040, 72.00, "
        "72.00, 31, 16, 16, 550.54.15\n"
    )
    broken = Answer(text=lines({"stage": "nvml", "error": "OSError: libnvidia-ml.so.1: invalid ELF header"}))
    torch = Answer(text=lines(BUILD | {"archs": ["sm_80", "sm_86"]}, {"stage": "devices", "devices": []}))
    facts = seen(answers(ask_torch=torch, ask_nvml=broken, nvidia_smi=Answer(text=row)))
    assert (facts.cards[0].kind, facts.nvidia.library, facts.nvidia.error) == ("NVIDIA L4", "550.54.15", "")


def test_nvidia_smi_that_refuses_is_the_drivers_error() -> None:
    refusal = Answer(failure="Failed to initialize NVML: Driver/library version mismatch")
    facts = seen(
        answers(ask_nvml=Answer(text=lines({"stage": "nvml", "error": "x"})), nvidia_smi=refusal),
        read=lambda p: (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.90.07  x" if "nvidia/version" in p else ""
        ),
    )
    assert facts.nvidia.kernel == "550.90.07" and "mismatch" in facts.nvidia.error


STRANGE = {
    "exits": "raise SystemExit(3)",
    "interrupts": "raise KeyboardInterrupt",
    "a base of its own": "class Odd(BaseException): pass\nraise Odd('half a driver')",
    "missing symbol": "raise ImportError('libtorch_cuda.so: undefined symbol: ncclCommRegister')",
    "not a module": "import sys; sys.modules['torch'] = 7; sys.modules['pynvml'] = 7",
    "ends at once": "import os; os._exit(9)",
    "crashes": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
    "aborts": "import os; os.abort()",
    "writes nonsense": "print('EVENER {\"stage\": 7}\\nEVENER {'); raise ValueError('\\x1b[31m\\udcff')",
    "hangs": "import time; time.sleep(100)",
    "broken text": "this is not Python",
}


@pytest.mark.parametrize("name", STRANGE)
def test_libraries_that_fail_in_strange_ways_become_facts(name: str, tmp_path: Path, monkeypatch) -> None:
    for library in ("torch", "pynvml"):
        (tmp_path / f"{library}.py").write_text(STRANGE[name])
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!{sys.executable} -S\nprint('\\x00\\xff no table', chr(27))\nraise SystemExit(255)\n")
    smi.chmod(smi.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    limit = 0.5 if name == "hangs" else 30.0
    monkeypatch.setattr(host, "TORCH_S", limit)
    monkeypatch.setattr(host, "DRIVER_S", limit)
    facts = seen(ask)
    assert facts.torch is not None and facts.torch.error
    assert {f.grade for f in findings(facts) if f.code == "DR119"} == {"fails"}
