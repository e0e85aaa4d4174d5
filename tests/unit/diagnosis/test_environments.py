"""Groups of devices that share a build, and files that say the same three times and parse."""

import re

import msgspec
import pytest
import yaml
from packaging.requirements import Requirement

from evener.core.catalogue import catalogue
from evener.core.fleet import Device, Fleet
from evener.core.host import Card, HostFacts, NvidiaDriver
from evener.diagnosis.environments import (
    environments,
    needs_of_fleet,
    needs_of_hosts,
    needs_of_kind,
    transports,
)
from evener.diagnosis.recipes import files
from evener.errors import UnknownNameError

MIXES = {
    "one card": ["RTX 3060"],
    "old and new": ["GTX 1080", "RTX 5090", "cpu"],
    "two vendors": ["Tesla V100-PCIE-16GB", "AMD Radeon RX 7900 XTX"],
    "override": ["gfx1031", "gfx1100"],
    "ARM and x86": ["GH200", "RTX 4090"],
    "no card": ["cpu"],
    "Mac and Intel": ["Apple M1", "Intel(R) Arc(TM) B580 Graphics"],
    "too old": ["sm_37"],
}


def made(*kinds: str):
    return environments([needs_of_kind(k) for k in kinds])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("one card", {"cu126": ["NVIDIA GeForce RTX 3060"]}),
        ("old and new", {"cu129": ["NVIDIA GeForce RTX 5090", "cpu"], "cu126": ["NVIDIA GeForce GTX 1080"]}),
        ("two vendors", {"cu126": ["Tesla V100-PCIE-16GB"], "rocm7.2": ["AMD Radeon RX 7900 XTX"]}),
        ("override", {"rocm7.2-override": ["gfx1031"], "rocm7.2": ["gfx1100"]}),
        ("ARM and x86", {"cu126-aarch64": ["NVIDIA GH200 480GB"], "cu126": ["NVIDIA GeForce RTX 4090"]}),
        ("no card", {"cpu": ["cpu"]}),
        ("Mac and Intel", {"default-arm64": ["Apple M1"], "xpu": ["Intel(R) Arc(TM) B580 Graphics"]}),
        ("too old", {"cpu": ["sm_37"]}),
    ],
)
def test_devices_share_builds(name, expected) -> None:
    assert {e.name: [n.name for n in e.needs] for e in made(*MIXES[name])} == expected


def test_two_builds_talk_over_gloo_and_one_does_not() -> None:
    two = transports(made(*MIXES["old and new"]))
    assert "2 builds" in two and "cu126 (x86_64)" in two and "Gloo" in two
    assert "one build serves all" in transports(made("RTX 3060", "RTX 3090"))
    assert "one build serves all" in transports(made(*MIXES["override"]))


def test_drivers_have_to_know_build_and_cards() -> None:
    new, old = made(*MIXES["old and new"])
    assert new.driver == "570"
    assert old.driver == "525.60.13" and "580 is the last" in old.notes[0]
    host = HostFacts(
        host="lab1",
        nvidia=NvidiaDriver(library="470.86"),
        cards=(Card(kind="NVIDIA A10", vendor="nvidia", arch="sm_86", torch_index=0),),
    )
    (found,) = environments(needs_of_hosts([host]))
    assert found.notes == ("lab1/gpu0: driver 470.86 has to become 525.60.13 or newer first",)


def test_a_fleet_and_hosts_are_read() -> None:
    fleet = Fleet(
        devices=(
            Device(name="lab1/gpu0", kind="NVIDIA GeForce RTX 3090", type="cuda"),
            Device(name="lab1/cpu", kind="anything (4 threads)"),
        )
    )
    assert [(n.name, n.arch) for n in needs_of_fleet(fleet)] == [("lab1/gpu0", "sm_86"), ("lab1/cpu", "cpu")]
    slices = HostFacts(
        host="a",
        cards=(
            Card(kind="NVIDIA A100-PCIE-40GB", vendor="nvidia", hardware_id="G", mig=True),
            Card(kind="NVIDIA A100-PCIE-40GB MIG 1g.5gb", vendor="nvidia", mig=True, parent="G"),
            Card(kind="AMD Radeon Graphics", vendor="amd", arch="gfx1036", integrated=True),
        ),
    )
    assert [(n.name, n.arch) for n in needs_of_hosts([slices, HostFacts(host="b")])] == [
        ("a/gpu0", "sm_80"),
        ("b/cpu", "cpu"),
    ]


def test_every_kind_of_the_catalogue_has_an_architecture() -> None:
    for device in catalogue().devices:
        assert needs_of_kind(device.kind).arch


def test_an_unknown_kind_names_those_like_it() -> None:
    with pytest.raises(UnknownNameError, match="RTX 3060"):
        needs_of_kind("RTX 3061")


KNOWN = {"FROM", "ARG", "ENV", "RUN", "COPY", "WORKDIR", "CMD"}


@pytest.mark.parametrize("name", MIXES)
def test_files_parse_and_agree(name: str) -> None:
    for found in made(*MIXES[name]):
        texts = files(found)
        conda = yaml.safe_load(texts["environment.yml"])
        pip = conda["dependencies"][-1]["pip"]
        lines = [x for x in texts["requirements.txt"].splitlines() if x and not x.startswith("#")]
        assert pip == lines
        wanted = Requirement(found.requirement)
        assert Requirement(next(x for x in lines if not x.startswith("-"))) == wanted
        assert str(next(iter(wanted.specifier)).version).partition("+")[2] == found.variant
        indices = [x for x in lines if "index-url" in x]
        assert indices == ([f"--extra-index-url ${{TORCH_INDEX}}/{found.variant}"] if found.variant else [])
        extra = "[nvidia]" if found.variant.startswith("cu") else ""
        assert (
            lines[-1] == f"-e ${{EVENER_SOURCE}}{extra}"
        )  # conda takes relative paths from its file's folder
        assert conda.get("variables", {}) == found.settings
        python = re.fullmatch(r"python=(\d+\.\d+)", conda["dependencies"][0])[1]
        if "Dockerfile" in texts:
            check_dockerfile(texts["Dockerfile"], found, python)
        else:
            assert found.machine == "arm64"


def check_dockerfile(text: str, found, python: str) -> None:
    lines = [x for x in text.splitlines() if x and not x.startswith("#")]
    words = [x.split()[0] for x in lines]
    assert set(words) <= KNOWN and words[0] == "FROM" and words.count("CMD") == 1
    assert lines[0].endswith(f" python:{python}-slim")
    assert words.index("ARG") < words.index("RUN")  # TORCH_INDEX is known where it is used
    assert sum(f'"{found.requirement}"' in x for x in lines) == 1
    settings = dict(x.split(" ", 1)[1].split("=", 1) for x in lines if x.startswith("ENV "))
    assert settings == {"PIP_NO_CACHE_DIR": "1", **found.settings}
    assert all(x.count('"') % 2 == 0 for x in lines)
    assert msgspec.json.decode(lines[-1].removeprefix("CMD ")) == ["evener", "doctor"]


@pytest.mark.parametrize("name", MIXES)
def test_no_file_names_a_registry_host(name: str) -> None:
    for found in made(*MIXES[name]):
        for text in files(found).values():
            assert "://" not in text.replace("https://github.com/", "")
