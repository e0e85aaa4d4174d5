"""Rows of the rules, held against torch's own lists, against each other and against orders that must hold."""

import platform
import re
from datetime import date
from pathlib import Path

import msgspec
import pytest

from evener.diagnosis import builds
from evener.diagnosis.rules import (
    MINIMUM_PYTHON,
    MINIMUM_TORCH,
    Rules,
    code,
    generation,
    override,
    rules,
    runs,
    toolkit,
    version,
)

torch_cuda = pytest.importorskip("torch.cuda")
ROOT = Path(__file__).parents[3]


def wrong_rows(table: Rules) -> list[str]:
    """What is wrong with the table, as far as it can be told without hardware."""
    found = []
    for wheel in table.wheels:
        place = f"torch {wheel.torch} {wheel.variant}"
        tools = next((t for t in table.toolkits if t.cuda == wheel.cuda), None)
        if wheel.variant != "cu" + wheel.cuda.replace(".", ""):
            found.append(f"{place}: the variant is not named after CUDA {wheel.cuda}")
        if tools is None:
            found.append(f"{place}: no row for the toolkit {wheel.cuda}")
            continue
        for machine, archs in wheel.archs.items():
            beyond = [a for a in archs if not tools.oldest <= a <= tools.newest]
            if beyond:
                found.append(f"{place} {machine}: CUDA {wheel.cuda} does not compile for {beyond}")
            own = torch_cuda.PYTORCH_RELEASES_CODE_CC.get(wheel.cuda, {}).get(machine)
            if version(wheel.torch) == version(torch_version())[:2] and own != set(archs):
                found.append(f"{place} {machine}: torch itself says {own}")
    for older, newer in zip(table.toolkits, table.toolkits[1:], strict=False):
        if version(older.cuda) >= version(newer.cuda):
            found.append(f"toolkits are not in order: {older.cuda}, {newer.cuda}")
        if version(older.driver) > version(newer.driver):
            found.append(f"CUDA {newer.cuda} asks for an older driver than {older.cuda}")
        if older.newest > newer.newest or older.oldest > newer.oldest:
            found.append(f"CUDA {newer.cuda} compiles for older or fewer cards than {older.cuda}")
    known = {c for g in table.generations for c in g.codes}
    found += [f"no generation has {c}" for c in torch_cuda.DEVICE_REQUIREMENT if c not in known]
    for one, other in zip(table.generations, table.generations[1:], strict=False):
        if (one.last_branch or 9999) > (other.last_branch or 9999) or max(one.codes) >= min(other.codes):
            found.append(f"{one.name} is dropped after {other.name}, which is newer")
    found += [f"{k.arch} is of a generation nobody knows" for k in table.kinds if unknown(k.arch, table)]
    twice = [k for row in table.kinds for k in row.kinds]
    found += [f"{k} has two architectures" for k in set(twice) if twice.count(k) > 1]
    built = {a for w in table.rocm_wheels for a in w.archs}
    found += [
        f"{o.value} points at {o.like}, which no build has" for o in table.overrides if o.like not in built
    ]
    for o in table.overrides:
        if o.like != "gfx" + o.value.replace(".", "") or set(o.archs) & built:
            found.append(f"override {o.value} does not belong to {o.like}, or to cards that have kernels")
    return found


def unknown(arch: str, table: Rules) -> bool:
    number = code(arch)
    return number is not None and not any(number in g.codes for g in table.generations)


def torch_version() -> str:
    import torch

    return torch.__version__


def test_no_row_is_wrong() -> None:
    assert wrong_rows(rules()) == []


def test_the_installed_build_is_as_its_row_says() -> None:
    import torch

    if not torch.version.cuda:
        pytest.skip("the installed torch is built without CUDA")
    own = {code(a) for a in torch._C._cuda_getArchFlags().split() if a.startswith("sm_")}
    rows = [w for w in rules().wheels if w.cuda == torch.version.cuda]
    row = next(w for w in rows if version(w.torch) == version(torch.__version__)[:2])
    assert own == set(row.archs[platform.machine()])
    assert row.nccl in (None, ".".join(map(str, torch.cuda.nccl.version())))


def changed(part: str, pick: dict, **new) -> Rules:
    """The rules with the first row of `part` that matches `pick` changed."""
    rows = list(getattr(rules(), part))
    place = next(i for i, r in enumerate(rows) if all(getattr(r, k) == v for k, v in pick.items()))
    rows[place] = msgspec.structs.replace(rows[place], **new)
    return msgspec.structs.replace(rules(), **{part: tuple(rows)})


WRONG = {
    "a card of two architectures": changed("kinds", {"arch": "sm_61"}, kinds=("Tesla T4",)),
    "a card of an architecture that is none": changed("kinds", {"arch": "sm_61"}, arch="sm_63"),
    "Volta in CUDA 13": changed(
        "wheels", {"torch": "2.9", "variant": "cu130"}, archs={"x86_64": (70, 75, 80, 86, 90, 100, 120)}
    ),
    "Blackwell in CUDA 12.6": changed(
        "wheels", {"torch": "2.8", "variant": "cu126"}, archs={"x86_64": (80, 90, 120)}
    ),
    "Pascal missing from this torch": changed(
        "wheels", {"torch": "2.13", "variant": "cu126"}, archs={"x86_64": (70, 75, 80, 86, 90)}
    ),
    "a variant under another's name": changed("wheels", {"torch": "2.10", "variant": "cu128"}, cuda="12.6"),
    "a driver older than its predecessor's": changed("toolkits", {"cuda": "13.0"}, driver="450.80.02"),
    "a toolkit that takes cards back": changed("toolkits", {"cuda": "13.2"}, oldest=50),
    "Pascal kept longer than Ampere": changed("generations", {"name": "Ampere"}, last_branch=570),
    "an override to a build nobody has": changed("overrides", {"value": "10.3.0"}, like="gfx1031"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_row_is_caught(name: str) -> None:
    assert wrong_rows(WRONG[name]) != []


def test_code_runs_where_torch_says_it_runs() -> None:
    known = torch_cuda.DEVICE_REQUIREMENT
    for built in known:
        for device in known:
            assert runs(built, device) == (device in known[built]), (built, device)


def test_every_row_has_a_source_and_a_date() -> None:
    for name in Rules.__struct_fields__:
        for row in getattr(rules(), name):
            assert len(row.source) > 10
            assert date(2020, 1, 1) <= date.fromisoformat(row.date) <= date(2026, 11, 30)


def test_what_evener_needs_is_what_its_metadata_asks_for() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'"torch>={MINIMUM_TORCH}"' in text
    assert f'requires-python = ">={MINIMUM_PYTHON}"' in text
    assert {w.torch for w in rules().wheels} >= {MINIMUM_TORCH}


def test_versions_and_architectures_are_read() -> None:
    assert version("2.13.0+cu126") == (2, 13, 0)
    assert version("unknown") == ()
    assert (code("sm_61"), code("sm_90a"), code("gfx1030")) == (61, 90, None)
    assert generation(61).name == "Pascal" and generation(9) is None
    assert toolkit("12.8").driver == "525.60.13" and toolkit("13.1").cuda == "13.0"
    assert toolkit("9.0") is None
    assert override("gfx1032").value == "10.3.0" and override("gfx1201") is None


@pytest.mark.parametrize(
    ("devices", "driver", "variants"),
    [
        ((70, 80), "", ["cu126"]),
        ((61, 120), "", []),
        ((86, 120), "570.86.10", ["cu129"]),
        ((86,), "535.161.08", ["cu126", "cu129"]),
        ((86,), "580.95.05", ["cu126", "cu129", "cu130", "cu132"]),
        ((86,), "470.86", []),
    ],
)
def test_builds_for_cards_and_driver(devices, driver, variants) -> None:
    assert [w.variant for w in builds.wheels_for(devices, driver=driver)] == variants


def fewest(codes: list[int]) -> int:
    """The fewest builds that carry all of `codes`, by trying all sets of builds."""
    from itertools import combinations

    wheels = builds.wheels_for([])
    for number in range(1, len(wheels) + 1):
        for chosen in combinations(wheels, number):
            if all(any(builds.carries(w.archs["x86_64"], c) for w in chosen) for c in codes):
                return number
    raise AssertionError


@pytest.mark.parametrize(
    "codes", [[61], [61, 86, 120], [50, 70, 75], [70, 80, 90, 120], [61, 70, 100], [75, 89, 121]]
)
def test_groups_are_as_few_as_builds_can_be(codes) -> None:
    groups = builds.by_build(codes)
    assert sorted(c for g in groups for c in g) == sorted(codes)
    assert len(groups) == fewest(codes)
    assert all(builds.wheels_for(g) for g in groups)


def test_no_registry_host_is_named() -> None:
    text = Path(builds.__file__).with_name("rules.json").read_text(encoding="utf-8")
    assert not re.search(r"download\.|pypi\.|index-url", text)
