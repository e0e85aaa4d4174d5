"""Every device of a host, usable or not, with the first reason that holds."""

from collections.abc import Iterator
from typing import Any

from evener.core.host import Card, HostFacts
from evener.diagnosis import amd, nvidia
from evener.diagnosis.choices import hidden, mode, sliced
from evener.diagnosis.finding import Finding, label
from evener.diagnosis.installed import another_build, without_torch

VENDORS: dict[str, Any] = {"nvidia": nvidia, "amd": amd}


def device_findings(facts: HostFacts) -> Iterator[Finding]:
    """One finding a device, or one for the host where a reason holds for all of them."""
    seen = set()
    for card in facts.cards:
        if card.mig and not card.parent and any(c.parent == card.hardware_id for c in facts.cards):
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
