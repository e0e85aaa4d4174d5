"""Whether the installed Python and torch serve: missing, broken, too old, or built for another vendor."""

from collections.abc import Iterator

from evener.core.host import Card, HostFacts
from evener.diagnosis import builds, nvidia
from evener.diagnosis.finding import Finding, label
from evener.diagnosis.rules import MINIMUM_PYTHON, MINIMUM_TORCH, version

SERVED = ("nvidia", "amd")


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
    if torch is None or card.vendor not in SERVED or card.torch_index is not None:
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
    driver = facts.nvidia.version if facts.nvidia else ""
    mine = builds.device_code(card)
    for wanted in (nvidia.codes(facts), [mine] if mine else []):
        for served_by in (driver, ""):
            fitting = builds.wheels_for(wanted, facts.machine, served_by)
            if fitting:
                return fitting[0].variant
    return "cpu"
