"""All findings on one host, graded."""

from evener.core.host import HostFacts
from evener.diagnosis.devices import device_findings
from evener.diagnosis.finding import GRADES, Finding
from evener.diagnosis.installed import version_findings
from evener.diagnosis.network import network
from evener.diagnosis.speed import speed
from evener.diagnosis.surroundings import surroundings


def findings(facts: HostFacts, *, peers: bool = False) -> tuple[Finding, ...]:
    """What was found on a host, the worst first; with `peers` it has to work with other hosts.

    Example: a GTX 1080 Ti (sm_61) with torch 2.13.0+cu130 gives DR101, "fails", mended by
    pip install "torch==2.13.0+cu126" --index-url "$TORCH_INDEX/cu126".
    """
    found = [
        *version_findings(facts),
        *device_findings(facts),
        *surroundings(facts),
        *network(facts, peers=peers),
        *speed(facts),
    ]
    return tuple(sorted(found, key=lambda f: -GRADES.index(f.grade)))
