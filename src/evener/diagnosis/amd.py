"""Why an AMD card cannot be used."""

from evener.core.host import AmdDriver, Card, HostFacts
from evener.diagnosis import builds
from evener.diagnosis.finding import Finding, label, read_in
from evener.diagnosis.rules import override, rules

SETTING = "HSA_OVERRIDE_GFX_VERSION"


def no_driver(facts: HostFacts, card: Card) -> Finding | None:
    """The kernel offers no compute interface for AMD cards."""
    driver = facts.amd or AmdDriver()
    if driver.kfd in ("ok", "denied"):
        return None
    inside = "docker run --device /dev/kfd --device /dev/dri --group-add render ..."
    outside = "sudo apt-get install amdgpu-dkms && sudo reboot"
    return Finding(
        code="DR107",
        grade="fails",
        where=facts.host,
        what="there is no /dev/kfd: AMD's driver is not loaded, or not passed into the container",
        evidence=driver.error or f"container: {facts.container or 'none'}",
        mend=inside if facts.container else outside,
    )


def denied(facts: HostFacts, card: Card) -> Finding | None:
    """/dev/kfd belongs to a group that the user is not in."""
    if (facts.amd or AmdDriver()).kfd != "denied":
        return None
    inside = "docker run --device /dev/kfd --device /dev/dri --group-add render --group-add video ..."
    outside = "sudo usermod -aG render,video $USER  # then log in again"
    return Finding(
        code="DR113",
        grade="fails",
        where=facts.host,
        what="this user may not open /dev/kfd, so torch sees no AMD card",
        evidence=(facts.amd or AmdDriver()).error or "/dev/kfd is there and cannot be opened",
        mend=inside if facts.container else outside,
        rule="https://github.com/ROCm/legacy-rocm-build/issues/1211 (2020-09-02)",
    )


def one_override(facts: HostFacts, card: Card) -> Finding | None:
    """The override speaks for all cards of a process, so unlike ones get wrong kernels."""
    value = facts.setting(SETTING)
    wanted = {a: builds.override(a) for a in (c.arch for c in facts.cards if c.vendor == "amd" and c.arch)}
    meant = {near.value if near else "" for near in wanted.values()}
    if value is None or len(meant) < 2:
        return None
    return Finding(
        code="DR117",
        grade="fails",
        where=facts.host,
        what=f"{SETTING}={value} holds for all AMD cards of this host, which are unlike",
        evidence=", ".join(sorted(wanted)),
        mend=f"unset {SETTING}  # and set it only for the process of the card that needs it",
    )


def no_kernels(facts: HostFacts, card: Card) -> Finding | None:
    """The build has no kernels for the card; a near architecture's may run on the user's word."""
    built = facts.torch.archs if facts.torch else ()
    if not card.arch or not built or card.arch in built:
        return None
    near = override(card.arch)
    if near and near.like in built:
        if facts.setting(SETTING) == near.value:
            grade, mend = "slow", ""
            what = f"{card.arch} runs the kernels of {near.like}, which AMD does not support"
        else:
            grade, mend = "fails", f"export {SETTING}={near.value}"
            what = f"torch has no kernels for {card.arch}; those of {near.like} may run"
        what += f" ({near.risk})" if near.risk else ""
    else:
        grade, what = "fails", f"torch has no kernels for {card.arch}, nor for a near architecture"
        wheel = builds.rocm_wheel([card.arch])
        mend = (
            builds.install_line(wheel.variant)
            if wheel
            else f"PYTORCH_ROCM_ARCH={card.arch} and a build of torch from source: no official one"
        )
    return Finding(
        code="DR116",
        grade=grade,  # type: ignore[arg-type]
        where=label(facts, card),
        what=what,
        evidence=f"{card.kind}; the build has {' '.join(built)}",
        mend=mend,
        rule=read_in(near),
    )


def left_out(facts: HostFacts, card: Card) -> Finding | None:
    """A processor's own graphics that torch does not offer is no device of a job, and no failure."""
    if not is_integrated(card) or card.torch_index is not None:
        return None
    return Finding(
        code="DR118",
        grade="works",
        where=label(facts, card),
        what="the processor's own graphics, which the job leaves out",
        evidence=f"{card.kind} ({card.arch or 'architecture unknown'})",
    )


def beside(facts: HostFacts, card: Card) -> Finding | None:
    """A processor's own graphics is counted as a card, and crashes what starts on it."""
    cards = [c for c in facts.cards if c.vendor == "amd"]
    real = [c for c in cards if not is_integrated(c) and c.smi_index is not None]
    if not is_integrated(card) or card.torch_index is None or not real:
        return None
    indices = ",".join(str(c.smi_index) for c in real)
    return Finding(
        code="DR118",
        grade="fails",
        where=label(facts, card),
        what="the processor's own graphics is offered as a device beside a card",
        evidence=f"{card.kind} ({card.arch or 'architecture unknown'})",
        mend=f"export ROCR_VISIBLE_DEVICES={indices}",
        rule="https://github.com/oobabooga/textgen/issues/7319 (2026-04-16)",
    )


def is_integrated(card: Card) -> bool:
    """Whether a card is a processor's own graphics, by what it says or by its architecture."""
    return bool(card.integrated) or any(card.arch in row.archs for row in rules().integrated)


BELOW_TORCH = (left_out, no_driver, denied)
ABOVE_TORCH = (one_override, beside, no_kernels)
