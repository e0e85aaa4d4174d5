"""What makes a device slower than it could be."""

from collections.abc import Iterator

from evener.core.host import Card, HostFacts
from evener.core.words import counted
from evener.diagnosis.finding import Finding, label, which

REDUCED = 0.95
"""A power limit below this part of the card's own is reported."""


def speed(facts: HostFacts) -> Iterator[Finding]:
    """Findings on clocks, power, lanes, data types and paths between cards."""
    for card in facts.cards:
        if card.torch_index is None:
            continue
        yield from _heat(facts, card)
        yield from _power(facts, card)
        yield from _lanes(facts, card)
        yield from _types(facts, label(facts, card), card.kind, card.dtypes, card.dtype_errors)
        yield from _node(facts, card)
    yield from _redirected(facts)


def _heat(facts: HostFacts, card: Card) -> Iterator[Finding]:
    if "heat" not in card.throttle:
        return
    at = f"{card.temperature_c:g} °C" if card.temperature_c is not None else "temperature unknown"
    if card.clock_mhz and card.max_clock_mhz:
        at += f", {card.clock_mhz:g} of {card.max_clock_mhz:g} MHz"
    ask = (
        f"nvidia-smi -i {which(card)} -q -d TEMPERATURE" if card.vendor == "nvidia" else "rocm-smi --showtemp"
    )
    yield Finding(
        code="DR401",
        grade="slow",
        where=label(facts, card),
        what="the card lowers its clock because it is too hot",
        evidence=at,
        mend=f"{ask}  # then clean and cool it",
        rule="https://github.com/rammsguns/llm-rig/issues/100 (2026-08-20)",
    )


def _power(facts: HostFacts, card: Card) -> Iterator[Finding]:
    limit, own = card.power_limit_w, card.default_power_limit_w
    if "brake" in card.throttle:
        yield Finding(
            code="DR402",
            grade="slow",
            where=label(facts, card),
            what="the host's power supply brakes the card",
            evidence=f"{card.kind}; power brake asserted",
            mend="check the supply, its cables and the host's power settings",
            rule="https://github.com/mlfoundations/open_clip/issues/703 (2023-10-25)",
        )
    elif limit and own and limit < REDUCED * own:
        yield Finding(
            code="DR402",
            grade="slow",
            where=label(facts, card),
            what="the card's power limit is below its own",
            evidence=f"{limit:g} of {own:g} W" + ("; it binds now" if "power" in card.throttle else ""),
            mend=f"sudo nvidia-smi -i {which(card)} -pl {own:g}"
            if card.vendor == "nvidia"
            else f"sudo rocm-smi -d {card.smi_index} --setpoweroverdrive {own:g}",
            rule="https://github.com/bradrlaw/ai-server/pull/32 (2026-08-04)",
        )


def _lanes(facts: HostFacts, card: Card) -> Iterator[Finding]:
    has, could = card.pcie_width, card.max_pcie_width
    if not has or not could or has * 2 > could:
        return
    yield Finding(
        code="DR403",
        grade="slow",
        where=label(facts, card),
        what="the card hangs on fewer PCIe lanes than it has",
        evidence=f"x{has} of x{could}",
        mend="put the card into a slot with all its lanes, without a riser",
    )


def _types(
    facts: HostFacts, where: str, kind: str, rates: dict[str, float], errors: dict[str, str]
) -> Iterator[Finding]:
    if not rates:
        return  # nothing was measured, or nothing runs, which is told elsewhere
    full = rates.get("float32")
    better = [n for n in ("float16", "bfloat16") if full and rates.get(n, 0.0) >= full]
    instead = better[0] if better else "float32"
    for name in ("bfloat16", "float16"):
        if name in errors:
            what, evidence = f"{name} does not run on {kind}", errors[name]
        elif full and name in rates and rates[name] < full:
            what = f"{name} is slower than float32 on {kind}"
            evidence = f"{rates[name] / 1e9:.4g} against {full / 1e9:.4g} GFLOP/s, measured"
        else:
            continue
        yield Finding(
            code="DR404",
            grade="slow",
            where=where,
            what=what,
            evidence=evidence,
            mend=f'ev.Recipe(..., precision="{instead}")',
            rule="https://github.com/vllm-project/vllm/issues/946 (2023-09-05)",
        )


def _node(facts: HostFacts, card: Card) -> Iterator[Finding]:
    allowed = facts.cpu.allowed_nodes
    if card.numa_node is None or len(facts.cpu.nodes) < 2 or not allowed or card.numa_node in allowed:
        return
    yield Finding(
        code="DR406",
        grade="slow",
        where=label(facts, card),
        what="this process runs on processors that are far from the card",
        evidence=f"card at node {card.numa_node}, process at {', '.join(map(str, allowed))}",
        mend=f"numactl --cpunodebind={card.numa_node} --membind={card.numa_node} evener ...",
    )


def _redirected(facts: HostFacts) -> Iterator[Finding]:
    cards = [c for c in facts.cards if c.vendor == "nvidia" and c.torch_index is not None and not c.parent]
    if not facts.acs or len(cards) < 2 or facts.setting("NCCL_P2P_DISABLE") == "1":
        return
    yield Finding(
        code="DR405",
        grade="fails",
        where=facts.host,
        what="bridges send traffic between cards through the root (ACS): NCCL hangs at its first sum",
        evidence=f"{counted(len(cards), 'card')} behind bridges with ACS redirection",
        mend="export NCCL_P2P_DISABLE=1  # at once; for full speed switch ACS off in the firmware",
        rule="https://github.com/NVIDIA/nccl/issues/2079 (2026-04-04)",
    )
