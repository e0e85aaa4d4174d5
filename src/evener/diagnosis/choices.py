"""Devices that somebody has chosen to hide, to slice or to reserve."""

from evener.core.host import Card, HostFacts
from evener.core.words import counted
from evener.diagnosis.finding import Finding, label, read_in, which
from evener.diagnosis.rules import mixing

VISIBLE = {
    "nvidia": ("CUDA_VISIBLE_DEVICES",),
    "amd": ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
}


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
                evidence=f"{name}={value}; {counted(len(ours), 'card')} of {card.vendor.upper()}",
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
    if card.mig and not card.parent:
        return Finding(
            code="DR112",
            grade="fails",
            where=label(facts, card),
            what="the card is in MIG mode and has no slices",
            evidence=card.kind,
            mend=f"sudo nvidia-smi -i {which(card)} -mig 0",
            rule=read_in(mixing("mig")),
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
        rule=read_in(mixing("mig")),
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
