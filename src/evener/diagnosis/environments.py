"""Environments for a job: which devices share one build of torch, and which builds one job needs."""

import re
from collections.abc import Sequence

from msgspec.structs import replace

from evener.core.catalogue import known_device, near_kinds
from evener.core.figures import Value
from evener.core.fleet import Fleet
from evener.core.host import HostFacts
from evener.diagnosis import builds
from evener.diagnosis.amd import is_integrated
from evener.diagnosis.rules import Wheel, arch_of, code, generation, override, toolkit, version
from evener.errors import UnknownNameError

PYTHON = "3.12"
"""One Python for all environments of a job; evener runs on 3.11 or newer."""


class Need(Value, frozen=True, kw_only=True):
    """A device that an environment has to serve. `arch` reads "sm_86", "gfx1100", "xpu", "mps" or "cpu"."""

    name: str
    arch: str
    machine: str = "x86_64"
    driver: str = ""


class Environment(Value, frozen=True, kw_only=True):
    """A build of torch, the devices that share it, and what they have to be told.

    `variant` is the build's name; "" is the one that the registry serves by itself. `driver` is the oldest
    that serves it. `notes` are sentences for the user.
    """

    name: str
    variant: str
    machine: str
    needs: tuple[Need, ...]
    driver: str = ""
    settings: dict[str, str] = {}
    notes: tuple[str, ...] = ()

    @property
    def requirement(self) -> str:
        """What pip is asked for. Example: "torch==2.13.0+cu126"."""
        return f"torch=={builds.PATCH}" + (f"+{self.variant}" if self.variant else "")


def needs_of_kind(kind: str) -> Need:
    """The need of a kind by its catalogue name or alias, or of an architecture named outright.

    Example: "RTX 3060" is sm_86, "sm_61" itself. UnknownNameError lists kinds whose names are like it.
    """
    if re.fullmatch(r"sm_\d+|gfx[0-9a-f]+|cpu|xpu|mps", kind):
        return Need(name=kind, arch=kind)
    known = known_device(kind)
    whole = known.kind if known else kind
    row = arch_of(whole)
    if row is not None:
        return Need(name=whole, arch=row.arch, machine=row.machine)
    if known is not None and known.type != "cuda":
        machine = "arm64" if known.type == "mps" else "x86_64"
        return Need(name=whole, arch=known.type, machine=machine)
    raise UnknownNameError(
        f"no architecture is known for the kind {kind!r}",
        remedy=f"one of: {', '.join(near_kinds(kind)) or 'evener env --help'}; or sm_86, gfx1100, cpu",
    )


def needs_of_fleet(fleet: Fleet) -> tuple[Need, ...]:
    """The needs of a fleet's devices, by their kinds; CPU devices need no build of their own kind."""
    needs = []
    for device in fleet.devices:
        found = Need(name="", arch="cpu") if device.type == "cpu" else needs_of_kind(device.kind)
        needs.append(Need(name=device.name, arch=found.arch, machine=found.machine))
    return tuple(needs)


def needs_of_hosts(hosts: Sequence[HostFacts]) -> tuple[Need, ...]:
    """The needs of what was found on hosts: their cards, and the CPU where there is none."""
    needs = []
    for facts in hosts:
        cards = [c for c in facts.cards if not (c.mig and not c.parent)]
        cards = [c for c in cards if not is_integrated(c) or c.torch_index is not None]
        for i, card in enumerate(cards):
            driver = facts.nvidia.version if facts.nvidia else ""
            arch = card.arch or needs_of_kind(card.kind).arch
            needs.append(
                Need(
                    name=f"{facts.host}/gpu{card.torch_index if card.torch_index is not None else i}",
                    arch=arch,
                    machine=facts.machine,
                    driver=driver if card.vendor == "nvidia" else "",
                )
            )
        if not cards:
            needs.append(Need(name=f"{facts.host}/cpu", arch="cpu", machine=facts.machine))
    return tuple(needs)


def environments(needs: Sequence[Need]) -> tuple[Environment, ...]:
    """The environments that serve all `needs`, as few as there are builds to be had.

    CPUs join an environment that their machine has anyway, since every build computes there. Example: a GTX
    1080, an RTX 5090 and a CPU give two: cu129 with the 5090 and the CPU, cu126 with the 1080.
    """
    made: list[Environment] = []
    for machine in dict.fromkeys(n.machine for n in needs):
        here = [n for n in needs if n.machine == machine]
        made += _nvidia([n for n in here if code(n.arch) is not None], machine)
        made += _amd([n for n in here if n.arch.startswith("gfx")], machine)
        made += _others([n for n in here if n.arch in ("xpu", "mps")], machine)
        made += _unknown([n for n in here if not _is_known(n.arch)], machine)
        cpus = tuple(n for n in here if n.arch == "cpu")
        place = next((i for i, e in enumerate(made) if e.machine == machine), None)
        if cpus and place is not None:
            known = made[place]
            made[place] = replace(known, needs=known.needs + cpus)
        elif cpus:
            made.append(_environment("cpu", machine, cpus))
    return tuple(made)


def transports(found: Sequence[Environment]) -> str:
    """The sentence on what devices talk over: a vendor's library, or Gloo between builds."""
    builds_needed = sorted({(e.variant or "default", e.machine) for e in found})
    if len(builds_needed) < 2:
        return "one build serves all devices"
    named = ", ".join(f"{variant} ({machine})" for variant, machine in builds_needed)
    return (
        f"one job needs {len(builds_needed)} builds of torch, {named}: devices of one build talk over their "
        "vendor's library, between builds over Gloo"
    )


def _nvidia(needs: list[Need], machine: str) -> list[Environment]:
    made = []
    for group in builds.by_build([c for n in needs if (c := code(n.arch)) is not None], machine):
        mine = tuple(n for n in needs if code(n.arch) in group)
        drivers = [n.driver for n in mine if n.driver]
        oldest = min(drivers, key=version, default="")
        fitting = builds.wheels_for(group, machine, oldest) or builds.wheels_for(group, machine)
        if not fitting:
            made.append(
                _environment(
                    "cpu",
                    machine,
                    mine,
                    notes=(
                        f"no official build has kernels for {', '.join(n.arch for n in mine)}: these devices "
                        "stay idle, or torch is built from source for them",
                    ),
                )
            )
            continue
        made.append(_with_driver(fitting[0], machine, group, mine))
    return made


def _with_driver(wheel: Wheel, machine: str, group: Sequence[int], needs: tuple[Need, ...]) -> Environment:
    """The environment of a build, with the drivers that serve both the build and all its cards."""
    known = [g for c in group if (g := generation(c))]
    tools = toolkit(wheel.cuda)
    oldest = [tools.driver if tools else "", *(str(g.first_branch) for g in known if g.first_branch)]
    driver = max(oldest, key=version)
    last = min((g.last_branch for g in known if g.last_branch), default=None)
    notes = [f"driver {last} is the last that knows all these cards"] if last else []
    for need in needs:
        if need.driver and version(need.driver) < version(driver):
            notes.append(f"{need.name}: driver {need.driver} has to become {driver} or newer first")
    return _environment(wheel.variant, machine, needs, driver=driver, notes=tuple(notes))


def _amd(needs: list[Need], machine: str) -> list[Environment]:
    """One environment for each override there has to be, because one holds for a whole process."""
    made = []
    for value in dict.fromkeys(near.value if (near := override(n.arch)) else "" for n in needs):
        mine = tuple(n for n in needs if ((o.value if (o := override(n.arch)) else "") == value))
        wheel = builds.rocm_wheel([n.arch for n in mine])
        if wheel is None:
            archs = ", ".join(dict.fromkeys(n.arch for n in mine))
            made.append(
                _environment("cpu", machine, mine, notes=(f"no official build has kernels for {archs}",))
            )
            continue
        notes = ["the list of this build was carried over from torch 2.11"] if wheel.assumed else []
        if value:
            notes.append(
                f"{', '.join(n.arch for n in mine)} run the kernels of a near architecture, unsupported"
            )
        settings = {"HSA_OVERRIDE_GFX_VERSION": value} if value else {}
        made.append(_environment(wheel.variant, machine, mine, settings=settings, notes=tuple(notes)))
    return made


def _is_known(arch: str) -> bool:
    return code(arch) is not None or arch.startswith("gfx") or arch in ("xpu", "mps", "cpu")


def _unknown(needs: list[Need], machine: str) -> list[Environment]:
    if not needs:
        return []
    note = (
        f"nothing is known of {', '.join(dict.fromkeys(n.arch[:40] for n in needs))}: these devices stay idle"
    )
    return [_environment("cpu", machine, tuple(needs), notes=(note,))]


def _others(needs: list[Need], machine: str) -> list[Environment]:
    made = []
    for arch in dict.fromkeys(n.arch for n in needs):
        mine = tuple(n for n in needs if n.arch == arch)
        made.append(_environment("xpu" if arch == "xpu" else "", machine, mine))
    return made


def _environment(
    variant: str,
    machine: str,
    needs: tuple[Need, ...],
    *,
    driver: str = "",
    settings: dict[str, str] | None = None,
    notes: tuple[str, ...] = (),
) -> Environment:
    parts = [variant or "default"] + ([] if machine == "x86_64" else [machine])
    parts += ["override"] if settings else []
    return Environment(
        name="-".join(parts),
        variant=variant,
        machine=machine,
        needs=needs,
        driver=driver,
        settings=settings or {},
        notes=notes,
    )
