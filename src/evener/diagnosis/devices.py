"""Every device of a host, usable or not, with the first reason that holds."""

from collections.abc import Iterator
from typing import Any

from evener.core.host import Card, HostFacts
from evener.diagnosis import amd, builds, nvidia
from evener.diagnosis.finding import Finding, label, which
from evener.diagnosis.rules import MINIMUM_PYTHON, MINIMUM_TORCH, rules, version

VISIBLE = {
    "nvidia": ("CUDA_VISIBLE_DEVICES",),
    "amd": ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
}
VENDORS: dict[str, Any] = {"nvidia": nvidia, "amd": amd}


def device_findings(facts: HostFacts) -> Iterator[Finding]:
    """One finding a device, or one for the host where a reason holds for all of them."""
    seen = set()
    for card in facts.cards:
        if card.mig and any(c.parent == card.hardware_id for c in facts.cards):
            continue  # its slices are the devices
        finding = _judge(facts, card)
        if finding not in seen:
            seen.add(finding)
            yield finding
    if not facts.cards:
        yield Finding(
            code="DR902",
            grade="works",
            where=facts.host,
            what="there is no accelerator: the CPU trains",
            evidence=facts.cpu.model or facts.machine,
        )


def _judge(facts: HostFacts, card: Card) -> Finding:
    module = VENDORS.get(card.vendor)
    below = module.BELOW_TORCH if module else ()
    above = module.ABOVE_TORCH if module else ()
    for reason in (*below, hidden, sliced, without_torch, another_build, *above, mode):
        found = reason(facts, card)
        if found is not None:
            return found
    if card.torch_index is None:
        return _unseen(facts, card)
    return _works(facts, card) if card.dtypes or not card.dtype_errors else _idle(facts, card)


def without_torch(facts: HostFacts, card: Card) -> Finding | None:
    """No torch, or one whose import fails."""
    torch = facts.torch
    mend = builds.install_line(_variant(facts, card))
    if torch is None:
        return Finding(
            code="DR120",
            grade="fails",
            where=facts.host,
            what="torch is not installed",
            evidence=f"Python {facts.python or 'unknown'}",
            mend=mend,
        )
    if not torch.error:
        return None
    again = builds.install_line(_variant(facts, card), again=True)
    if "nccl" in torch.error.lower():
        what = "torch cannot be imported: it finds an NCCL that is not its own"
        mend = "unset LD_LIBRARY_PATH LD_PRELOAD && " + mend.replace(
            "install ", "install --force-reinstall ", 1
        )
        rule = "https://github.com/pytorch/pytorch/issues/119932 (2024-02-15)"
    else:
        what, rule, mend = "torch cannot be imported", "", again
    return Finding(
        code="DR119", grade="fails", where=facts.host, what=what, evidence=torch.error, mend=mend, rule=rule
    )


def another_build(facts: HostFacts, card: Card) -> Finding | None:
    """A build serves one vendor, or none."""
    torch = facts.torch
    if torch is None or card.vendor not in VENDORS or card.torch_index is not None:
        return None
    mine, other = (torch.cuda, torch.hip) if card.vendor == "nvidia" else (torch.hip, torch.cuda)
    if mine:
        return None
    mend = builds.install_line(_variant(facts, card))
    if not other:
        return Finding(
            code="DR102",
            grade="fails",
            where=facts.host,
            what=f"torch {torch.version} is built without accelerators",
            evidence=f"{card.kind} is there; the build names neither CUDA nor ROCm",
            mend=mend,
            rule="https://github.com/pytorch/pytorch/issues/168065 (2025-11-18)",
        )
    built = f"CUDA {torch.cuda}" if torch.cuda else f"ROCm {torch.hip}"
    return Finding(
        code="DR103",
        grade="fails",
        where=label(facts, card),
        what=f"torch is built for {built}, the card is {card.vendor.upper()}'s",
        evidence=f"{card.kind}; torch {torch.version}",
        mend=f"python -m venv {card.vendor} && {card.vendor}/bin/{mend}",
        rule="https://github.com/unslothai/unsloth/issues/10450 (2026-09-07)",
    )


def hidden(facts: HostFacts, card: Card) -> Finding | None:
    """A setting lists the cards that a process may see; this one is not among them, or the list is wrong."""
    if card.torch_index is not None:
        return None
    ours = [c for c in facts.cards if c.vendor == card.vendor]
    known = [c for c in ours if c.smi_index is not None or c.torch_index is not None]
    if facts.container and known and card not in known and not card.parent:
        return Finding(
            code="DR114",
            grade="works",
            where=label(facts, card),
            what="not passed into the container, so the job leaves it out",
            evidence=f"{card.kind} is on the bus, and the driver does not show it here",
            mend="docker run --gpus all ..."
            if card.vendor == "nvidia"
            else "docker run --device /dev/kfd --device /dev/dri ...",
        )
    for name in VISIBLE.get(card.vendor, ()):
        value = facts.setting(name)
        if value is None:
            continue
        wanted = [w.strip() for w in value.split(",") if w.strip() and w.strip() != "-1"]
        wrong = [w for w in wanted if not _names_one(w, ours)]
        if wrong:
            return Finding(
                code="DR124",
                grade="fails",
                where=facts.host,
                what=f"{name} names {wrong[0]!r}, which is no card of this host; what follows it is not read",
                evidence=f"{name}={value}; {len(ours)} cards of {card.vendor.upper()}",
                mend=f"unset {name}",
            )
        seen = sum(c.torch_index is not None for c in ours)
        slices = any(w.startswith("MIG") for w in wanted)
        named = bool(card.hardware_id) and card.hardware_id in wanted
        if seen == len(wanted) and bool(card.parent) == slices and not named:
            return Finding(
                code="DR114",
                grade="works",
                where=label(facts, card),
                what=f"hidden by {name}, so the job leaves it out",
                evidence=f"{card.kind}; {name}={value!r}",
                mend=f"unset {name}",
            )
    return None


def _names_one(word: str, cards: list[Card]) -> bool:
    if word.isdigit():
        return int(word) < max(1, len([c for c in cards if not c.parent]))
    return any(c.hardware_id and c.hardware_id.startswith(word) for c in cards)


def sliced(facts: HostFacts, card: Card) -> Finding | None:
    """Slices are devices of their own, one to a process; a card in MIG mode without slices is none."""
    rule = next(f"{m.source} ({m.date})" for m in rules().mixing if m.what == "mig")
    if card.mig and not card.parent:
        return Finding(
            code="DR112",
            grade="fails",
            where=label(facts, card),
            what="the card is in MIG mode and has no slices",
            evidence=card.kind,
            mend=f"sudo nvidia-smi -i {which(card)} -mig 0",
            rule=rule,
        )
    if not card.parent or card.torch_index is not None or card.vendor != "nvidia":
        return None
    return Finding(
        code="DR112",
        grade="fails",
        where=label(facts, card),
        what="a process sees one slice only, and this one needs a process of its own",
        evidence=f"{card.kind}, slice of {card.parent}",
        mend=f"export CUDA_VISIBLE_DEVICES={card.hardware_id}  # in the process for this slice",
        rule=rule,
    )


def mode(facts: HostFacts, card: Card) -> Finding | None:
    """The compute mode may bar processes."""
    if card.compute_mode not in ("exclusive", "prohibited"):
        return None
    if card.compute_mode == "exclusive" and card.dtypes:
        return None  # the one process that it takes was ours
    return Finding(
        code="DR115",
        grade="fails",
        where=label(facts, card),
        what=f"the card's compute mode is {card.compute_mode}, and it is taken"
        if card.compute_mode == "exclusive"
        else "the card's compute mode is prohibited",
        evidence=f"{card.kind}; torch: {(facts.torch.device_error if facts.torch else '') or 'no error'}",
        mend=f"sudo nvidia-smi -i {which(card)} -c DEFAULT",
        rule="https://github.com/iffiX/machin/issues/25 (2021-10-18)",
    )


def _unseen(facts: HostFacts, card: Card) -> Finding:
    error = facts.torch.device_error if facts.torch else ""
    return Finding(
        code="DR122",
        grade="fails",
        where=label(facts, card),
        what="torch does not see the card, and no rule says why",
        evidence=f"{card.kind}; torch: {error or 'no error'}; driver: {card.error or 'no error'}",
        mend="python -c 'import torch; torch.zeros(1, device=\"cuda\")'  # and read its error",
    )


def _idle(facts: HostFacts, card: Card) -> Finding:
    errors = dict.fromkeys(card.dtype_errors.values())
    return Finding(
        code="DR122",
        grade="fails",
        where=label(facts, card),
        what="torch sees the card, and nothing that was tried runs on it",
        evidence=f"{card.kind}; torch: {'; '.join(errors)}",
        mend="python -c 'import torch; print(torch.ones(2, device=\"cuda\") + 1)'  # and read its error",
    )


def _works(facts: HostFacts, card: Card) -> Finding:
    rates = ", ".join(f"{name} {rate / 1e9:.4g} GFLOP/s" for name, rate in card.dtypes.items())
    told = [card.arch, f"{card.memory_bytes / 2**30:.1f} GiB" if card.memory_bytes else "", rates]
    told += [f"slice of {card.parent}" if card.mig else f"die of {card.parent}" if card.parent else ""]
    told += [card.hardware_id or card.bus_id]
    told += [f"the vendor's tool counts it as {card.smi_index}" if card.smi_index is not None else ""]
    told += [
        f"{card.clock_mhz:g} of {card.max_clock_mhz:g} MHz" if card.clock_mhz and card.max_clock_mhz else ""
    ]
    told += [f"{card.power_limit_w:g} W at most" if card.power_limit_w else ""]
    told += [f"memory node {card.numa_node}" if card.numa_node is not None else ""]
    return Finding(
        code="DR100",
        grade="works",
        where=label(facts, card),
        what=f"{card.kind} works",
        evidence=", ".join(t for t in told if t),
    )


def version_findings(facts: HostFacts) -> Iterator[Finding]:
    """Versions of Python and torch that evener itself asks for."""
    if facts.python and version(facts.python) < version(MINIMUM_PYTHON):
        yield Finding(
            code="DR205",
            grade="fails",
            where=facts.host,
            what=f"evener needs Python {MINIMUM_PYTHON} or newer",
            evidence=f"Python {facts.python}",
            mend=f"conda create -n evener python={MINIMUM_PYTHON}",
        )
    torch = facts.torch
    if torch and torch.version and version(torch.version) < version(MINIMUM_TORCH):
        card = next(iter(facts.cards), Card(kind="", vendor="intel"))
        yield Finding(
            code="DR123",
            grade="fails",
            where=facts.host,
            what=f"evener needs torch {MINIMUM_TORCH} or newer",
            evidence=f"torch {torch.version}",
            mend=builds.install_line(_variant(facts, card)),
        )
    if torch is None and not facts.cards:
        yield Finding(
            code="DR120",
            grade="fails",
            where=facts.host,
            what="torch is not installed",
            evidence=f"Python {facts.python or 'unknown'}",
            mend=builds.install_line("cpu"),
        )
    elif torch and torch.error and not facts.cards:
        yield Finding(
            code="DR119",
            grade="fails",
            where=facts.host,
            what="torch cannot be imported",
            evidence=torch.error,
            mend=builds.install_line("cpu", again=True),
        )


def _variant(facts: HostFacts, card: Card) -> str:
    """The build for a card: one that carries all cards of its vendor here, else itself, else none."""
    if card.vendor == "amd":
        archs = [c.arch for c in facts.cards if c.vendor == "amd" and c.arch]
        wheel = builds.rocm_wheel(archs) or builds.rocm_wheel([card.arch] if card.arch else [])
        return wheel.variant if wheel else "cpu"
    if card.vendor != "nvidia":
        return "cpu"
    driver = (facts.nvidia.library or facts.nvidia.kernel) if facts.nvidia else ""
    mine = builds.device_code(card)
    for wanted in (nvidia.codes(facts), [mine] if mine else []):
        for served_by in (driver, ""):
            fitting = builds.wheels_for(wanted, facts.machine, served_by)
            if fitting:
                return fitting[0].variant
    return "cpu"
