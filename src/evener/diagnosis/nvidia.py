"""Why an NVIDIA card cannot be used: one reason a function, asked in order, the first that holds counts."""

from evener.core.host import Card, HostFacts, NvidiaDriver
from evener.diagnosis import builds
from evener.diagnosis.finding import Finding, label, read_in
from evener.diagnosis.rules import Generation, generation, rules, toolkit, version

REBOOT = "sudo reboot"
NO_KERNEL = "no kernel image"
LOST = ("lost", "fallen off", "unable to determine the device handle")


def lost_by_container(facts: HostFacts, card: Card) -> Finding | None:
    """systemd reloaded its units and took the device nodes from a running container."""
    error = _driver(facts).error
    if not facts.container or "unknown error" not in error.lower():
        return None
    return Finding(
        code="DR121",
        grade="fails",
        where=facts.host,
        what="the container has lost its cards since it was started",
        evidence=f"NVML: {error}",
        mend="docker restart CONTAINER  # on the host",
        rule="https://github.com/NVIDIA/nvidia-docker/issues/1730 (2023-02-07)",
    )


def halves_differ(facts: HostFacts, card: Card) -> Finding | None:
    """The driver was updated while its module was loaded."""
    driver = _driver(facts)
    differ = driver.library and driver.kernel and driver.library != driver.kernel
    if facts.wsl or not (differ or "version mismatch" in driver.error.lower()):
        return None
    versions = f"kernel module {driver.kernel or 'unknown'}, library {driver.library or 'unknown'}"
    return Finding(
        code="DR106",
        grade="fails",
        where=facts.host,
        what="the driver's kernel module and its library are of different versions",
        evidence=f"{versions}; NVML: {driver.error or 'no error'}",
        mend=REBOOT,
        rule="https://github.com/oddmario/NVIDIA-Ubuntu-Driver-Guide/issues/4 (2024-09-08)",
    )


def no_driver(facts: HostFacts, card: Card) -> Finding | None:
    """Nothing of NVIDIA's driver is loaded."""
    driver = _driver(facts)
    loaded = driver.library or (driver.kernel and not facts.container)  # a container sees the host's module
    if loaded or card.torch_index is not None or (facts.wsl and not driver.error):
        return None
    nouveau = "nouveau" in facts.modules
    if facts.container:
        mend = "docker run --gpus all ...  # and nvidia-container-toolkit on the host"
    elif facts.wsl:
        mend = "install NVIDIA's driver in Windows, not in WSL; then: wsl --shutdown"
    else:
        mend = f"{driver_line(facts, card)} && {REBOOT}"
    return Finding(
        code="DR107",
        grade="fails",
        where=facts.host,
        what="NVIDIA's driver is not loaded" + (": nouveau holds the card" if nouveau else ""),
        evidence=driver.error or "neither a kernel module nor NVML",
        mend=mend,
    )


def lost(facts: HostFacts, card: Card) -> Finding | None:
    """The driver knows the card and gets no answer from it."""
    if not any(word in card.error.lower() for word in LOST):
        return None
    return Finding(
        code="DR109",
        grade="fails",
        where=label(facts, card),
        what="the card does not answer any more: power, seat or heat",
        evidence=card.error,
        mend=f"{REBOOT}  # and if it happens again: seat the card anew, check its power cables",
        rule="https://github.com/NVIDIA/open-gpu-kernel-modules/issues/387 (2022-10-19)",
    )


def flavour(facts: HostFacts, card: Card) -> Finding | None:
    """NVIDIA ships its module twice: the open one drives Turing and later, the other no Blackwell."""
    driver, device, known = _driver(facts), builds.device_code(card), _generation(card)
    if known is None or driver.open_kernel is None or card.torch_index is not None:
        return None
    wrong = "no" if driver.open_kernel else "must"
    if known.open_kernel != wrong:
        return None
    loaded = "open" if driver.open_kernel else "closed"
    return Finding(
        code="DR108",
        grade="fails",
        where=label(facts, card),
        what=f"the {loaded} kernel module does not drive {known.name} cards",
        evidence=f"{card.kind}, {builds.named(device or 0)}; {loaded} module {driver.kernel}",
        mend=f"{driver_line(facts, card)} && {REBOOT}" if not _needs_both(facts) else APART_LINE,
        rule=read_in(known),
    )


APART_LINE = "put the card into another host: no kernel module drives both generations"


def branch(facts: HostFacts, card: Card) -> Finding | None:
    """Branches of the driver begin and end with generations of cards."""
    driver, device, known = _driver(facts), builds.device_code(card), _generation(card)
    major = (version(driver.version) or (0,))[0]
    if known is None or not major or card.torch_index is not None:
        return None
    if known.last_branch is not None and major > known.last_branch:
        what = (
            f"driver {major} has dropped {known.name} cards; the last that knows them is {known.last_branch}"
        )
    elif known.first_branch is not None and major < known.first_branch:
        what = f"driver {major} does not know {known.name} cards yet; the first is {known.first_branch}"
    else:
        return None
    return Finding(
        code="DR105",
        grade="fails",
        where=label(facts, card),
        what=what,
        evidence=f"{card.kind}, {builds.named(device or 0)}; driver {driver.version}",
        mend=f"{driver_line(facts, card)} && {REBOOT}",
        rule=read_in(known),
    )


def fabric(facts: HostFacts, card: Card) -> Finding | None:
    """Cards behind NVSwitches start only after the fabric manager has set the switches up."""
    error = facts.torch.device_error if facts.torch else ""
    if _driver(facts).fabric != "stopped" and "802" not in error:
        return None
    if facts.container:
        mend = "sudo systemctl enable --now nvidia-fabricmanager  # on the host, then restart the container"
    else:
        mend = "sudo systemctl enable --now nvidia-fabricmanager"
    return Finding(
        code="DR110",
        grade="fails",
        where=facts.host,
        what="the fabric manager does not run, so CUDA does not start on cards behind NVSwitches",
        evidence=f"fabric manager: {_driver(facts).fabric or 'unknown'}; torch: {error or 'no error'}",
        mend=mend,
        rule="https://github.com/pytorch/pytorch/issues/35710 (2021-08-18)",
    )


def other_libcuda(facts: HostFacts, card: Card) -> Finding | None:
    """Images bring a compatibility libcuda, which does not go with every driver and card."""
    error = facts.torch.device_error if facts.torch else ""
    if "803" not in error:
        return None
    found = _driver(facts).compat_library or "not found out"
    return Finding(
        code="DR111",
        grade="fails",
        where=facts.host,
        what="a libcuda that is not the driver's is loaded, and does not go with it",
        evidence=f"libcuda: {found}; driver {_driver(facts).kernel or 'unknown'}; torch: {error}",
        mend=f"export LD_LIBRARY_PATH=/usr/lib/{facts.machine}-linux-gnu:$LD_LIBRARY_PATH",
        rule="https://github.com/NVIDIA/nvidia-docker/issues/1256 (2020-04-24)",
    )


def driver_too_old(facts: HostFacts, card: Card) -> Finding | None:
    """Each major version of CUDA needs a driver from its own time or later."""
    built = facts.torch.cuda if facts.torch else None
    found = _driver(facts).version
    tools = toolkit(built) if built else None
    if tools is None or not found or card.torch_index is not None:
        return None
    if version(found) >= version(tools.driver):
        return None
    fitting = builds.wheels_for(codes(facts), facts.machine, found)
    newer = f"sudo apt-get install nvidia-driver-{version(tools.driver)[0]} && {REBOOT}"
    return Finding(
        code="DR104",
        grade="fails",
        where=facts.host,
        what=f"torch is built for CUDA {built}, which needs driver {tools.driver} or newer",
        evidence=f"driver {found}",
        mend=builds.install_line(fitting[0].variant) if fitting else newer,
        rule=read_in(tools),
    )


def no_kernels(facts: HostFacts, card: Card) -> Finding | None:
    """The build's kernels are for other architectures; what was measured to work goes before any list."""
    device = builds.device_code(card)
    built = _archs(facts)
    tried_in_vain = any(NO_KERNEL in error for error in card.dtype_errors.values())
    listed = not built or builds.carries(built, device or 0)
    if device is None or card.dtypes or (listed and not tried_in_vain):
        return None
    found = _driver(facts).version
    together = builds.wheels_for(codes(facts), facts.machine, found)
    alone = builds.wheels_for([device], facts.machine, found)
    fitting = together or alone
    if fitting:
        mend = builds.install_line(fitting[0].variant)
        if not together:
            mend += "  # in an environment of its own: no build carries all cards of this host"
    elif builds.wheels_for([device], facts.machine):
        mend = f"{driver_line(facts, card)} && {REBOOT}  # then a build for CUDA 13"
    else:
        mend = f"TORCH_CUDA_ARCH_LIST={device / 10} and a build of torch from source: no official one"
    has = " ".join(f"sm_{c}" for c in sorted(built)) or "no list of its own"
    return Finding(
        code="DR101",
        grade="fails",
        where=label(facts, card),
        what=f"torch {_torch(facts)} has no kernels for {builds.named(device)}",
        evidence=f"{card.kind}; the build has {has}",
        mend=mend,
        rule=next((read_in(w) for w in fitting), ""),
    )


def codes(facts: HostFacts) -> list[int]:
    """The architectures of the host's NVIDIA cards, where known."""
    return [c for c in map(builds.device_code, facts.cards) if c is not None]


def driver_line(facts: HostFacts, card: Card) -> str:
    """The command that installs the driver for a card, in Ubuntu's names: "-open" where it has to be."""
    known = _generation(card)
    return "sudo apt-get install nvidia-driver-580" + (
        "-open" if known is not None and known.open_kernel == "must" else ""
    )


def _generation(card: Card) -> Generation | None:
    device = builds.device_code(card)
    return generation(device) if device is not None else None


def _needs_both(facts: HostFacts) -> bool:
    wanted = {g.open_kernel for g in map(generation, codes(facts)) if g}
    return {"no", "must"} <= wanted


def _driver(facts: HostFacts) -> NvidiaDriver:
    return facts.nvidia or NvidiaDriver()


def _torch(facts: HostFacts) -> str:
    return facts.torch.version if facts.torch else ""


def _archs(facts: HostFacts) -> tuple[int, ...]:
    """Architectures of the installed build: its own word, else the table's."""
    torch = facts.torch
    if torch is None or not torch.cuda:
        return ()
    own = [builds.code(a) for a in torch.archs if a.startswith("sm_")]
    if own:
        return tuple(c for c in own if c is not None)
    for wheel in rules().wheels:
        if version(wheel.torch) == version(torch.version)[:2] and wheel.cuda == torch.cuda:
            return wheel.archs.get(facts.machine, ())
    return ()


BELOW_TORCH = (lost_by_container, halves_differ, no_driver, lost, flavour, branch, fabric, other_libcuda)
"""In this order: what is broken further down hides what would be broken above it."""
ABOVE_TORCH = (driver_too_old, no_kernels)
