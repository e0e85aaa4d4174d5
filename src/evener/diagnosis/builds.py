"""Which official builds of torch serve which cards, and the line that installs one."""

from collections.abc import Sequence

from evener.core.host import Card
from evener.diagnosis.rules import (
    MINIMUM_TORCH,
    RocmWheel,
    Wheel,
    code,
    generation,
    override,
    rules,
    runs,
    toolkit,
    version,
)

INDEX = "TORCH_INDEX"
"""Environment variable that holds the user's index of torch builds; its folders are named like variants."""
PATCH = f"{MINIMUM_TORCH}.0"


def install_line(variant: str, *, again: bool = False) -> str:
    """The command that installs the build `variant` of the torch evener needs, `again` over a broken one.

    Example: "cu126" gives pip install "torch==2.13.0+cu126" --index-url "$TORCH_INDEX/cu126".
    """
    force = "--force-reinstall " if again else ""
    return f'pip install {force}"torch=={PATCH}+{variant}" --index-url "${INDEX}/{variant}"'


def carries(archs: Sequence[int], device: int) -> bool:
    """Whether a build with kernels for `archs` runs on a device. Example: (80, 86) carries 89, not 75."""
    return any(runs(built, device) for built in archs)


def wheels_for(devices: Sequence[int], machine: str = "x86_64", driver: str = "") -> tuple[Wheel, ...]:
    """The builds of the torch evener needs that carry all `devices`, those first that old drivers serve.

    With a `driver` given, builds whose CUDA asks for a newer one are left out. Example: (70, 80) on x86_64
    gives cu126 alone, (61, 120) nothing.
    """
    fitting = []
    for wheel in rules().wheels:
        tools = toolkit(wheel.cuda)
        served = not driver or tools is None or version(driver) >= version(tools.driver)
        carried = all(carries(wheel.archs.get(machine, ()), d) for d in devices)
        if wheel.torch == MINIMUM_TORCH and served and carried:
            fitting.append(wheel)
    return tuple(sorted(fitting, key=lambda w: version(w.cuda)))


def rocm_wheel(archs: Sequence[str]) -> RocmWheel | None:
    """The build of the torch evener needs that has kernels for all AMD `archs`, or for ones near enough."""
    for wheel in rules().rocm_wheels:
        if wheel.torch == MINIMUM_TORCH and all(kernels_for(a, wheel.archs) for a in archs):
            return wheel
    return None


def kernels_for(arch: str, built: Sequence[str]) -> str:
    """The architecture of `built` whose kernels an AMD card runs: its own, else a near one's, else ""."""
    if arch in built:
        return arch
    near = override(arch)
    return near.like if near and near.like in built else ""


def device_code(card: Card) -> int | None:
    """The number of an NVIDIA card's architecture; None where it is unknown or the card is another's."""
    return code(card.arch) if card.vendor == "nvidia" else None


def by_build(codes: Sequence[int], machine: str = "x86_64") -> tuple[tuple[int, ...], ...]:
    """NVIDIA architectures in as few groups as there are builds needed; each group shares one build.

    The newest cards choose first, and each build takes all it carries. Example: (61, 86, 120) gives
    (86, 120) and (61,). An architecture that no build carries stands alone.
    """
    left = sorted(set(codes))
    groups = []
    while left:
        newest = left[-1]
        wheels = wheels_for([newest], machine)
        shared = [[c for c in left if carries(w.archs[machine], c)] for w in wheels] or [[newest]]
        taken = max(shared, key=len)
        groups.append(tuple(taken))
        left = [c for c in left if c not in taken]
    return tuple(groups)


def named(device: int) -> str:
    """An architecture in words. Example: 61 is "sm_61 (Pascal)"."""
    found = generation(device)
    return f"sm_{device} ({found.name})" if found else f"sm_{device}"
