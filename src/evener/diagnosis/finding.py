"""What a finding is, and what each code means."""

from typing import Literal

from evener.core.figures import Value
from evener.core.host import Card, HostFacts
from evener.diagnosis.rules import Row

Grade = Literal["works", "slow", "fails"]
GRADES: tuple[Grade, ...] = ("works", "slow", "fails")
"""From good to bad: works; works slowly; will fail as it stands."""

CODES = {
    "DR100": "a device that works",
    "DR101": "the build of torch has no kernels for the card",
    "DR102": "torch is built without accelerators",
    "DR103": "torch is built for another vendor",
    "DR104": "the driver is older than the build's CUDA asks for",
    "DR105": "the driver does not know the card",
    "DR106": "kernel module and library of the driver differ",
    "DR107": "no driver",
    "DR108": "the kernel module's flavour does not drive the card",
    "DR109": "the card is lost",
    "DR110": "the fabric manager does not run",
    "DR111": "another libcuda lies before the driver's",
    "DR112": "slices (MIG) that a process cannot see, or none",
    "DR113": "no permission",
    "DR114": "hidden by a setting",
    "DR115": "the card takes one process only, or none",
    "DR116": "AMD architecture without kernels",
    "DR117": "one override for unlike AMD cards",
    "DR118": "a processor's graphics beside a card",
    "DR119": "torch cannot be imported",
    "DR120": "no torch",
    "DR121": "the container lost its cards",
    "DR122": "torch cannot use the card, for a reason that no rule knows",
    "DR123": "torch is too old",
    "DR124": "a setting names a card that is not here",
    "DR201": "little shared memory",
    "DR202": "few open files allowed",
    "DR203": "little locked memory beside InfiniBand",
    "DR204": "several cards under WSL",
    "DR205": "Python is too old",
    "DR206": "one thread on many cores",
    "DR207": "a setting for debugging",
    "DR208": "torch and the vendor's tool count cards differently",
    "DR209": "others hold memory of the card",
    "DR301": "the first interface leads nowhere",
    "DR302": "the host's name leads to itself",
    "DR303": "a setting names an interface that is not usable",
    "DR304": "the route to a peer is not the fastest interface",
    "DR305": "no route to a peer",
    "DR401": "too hot",
    "DR402": "power limit",
    "DR403": "fewer lanes than the card has",
    "DR404": "a data type that is slow or missing",
    "DR405": "bridges redirect traffic between cards",
    "DR406": "the card is at another memory node",
    "DR501": "NCCL versions differ",
    "DR502": "vendors differ",
    "DR503": "torch versions differ",
    "DR504": "Python versions differ",
    "DR505": "no build carries all cards",
    "DR506": "evener versions differ",
    "DR507": "two hosts have one name",
    "DR901": "something could not be found out",
    "DR902": "no accelerator",
}


class Finding(Value, frozen=True, kw_only=True):
    """One thing found: its grade, where, the evidence, the exact line that mends it, the rule behind it."""

    code: str
    grade: Grade
    where: str
    what: str
    evidence: str = ""
    mend: str = ""
    rule: str = ""


def worst(findings: tuple[Finding, ...]) -> Grade:
    """The worst grade among `findings`; "works" where there are none."""
    return max((f.grade for f in findings), key=GRADES.index, default="works")


def label(facts: HostFacts, card: Card) -> str:
    """A card's name in findings: as in a fleet where torch counts it, else by its address or id."""
    if card.torch_index is not None:
        return f"{facts.host}/gpu{card.torch_index}"
    return f"{facts.host}/{card.hardware_id if card.parent else card.bus_id or card.hardware_id or card.kind}"


def read_in(row: Row | None) -> str:
    """Where a rule was read and when."""
    return f"{row.source} ({row.date})" if row else ""


def which(card: Card) -> str:
    """How the vendor's tools are told which card: its address on the bus, else its id."""
    return card.bus_id or card.hardware_id
