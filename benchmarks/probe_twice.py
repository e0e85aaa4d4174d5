"""Does a second probe differ by less than the printed spread? Probes this host several times and compares.

    python benchmarks/probe_twice.py [--probes 2] [--quick] [--json]

With --json the last line has `figures` (how many), `outside` (of the first spread) and `worst`.
Exit code 1 when any figure lies outside.
"""

import argparse
import itertools
import json
import time
from dataclasses import asdict, dataclass

from evener.core.fleet import Fleet
from evener.probing import probe


@dataclass(frozen=True)
class Difference:
    """One figure of two probes: their relative difference and the spread that was printed first."""

    name: str
    difference: float
    spread: float

    @property
    def ratio(self) -> float:
        return self.difference / self.spread


def differences(first: Fleet, second: Fleet) -> list[Difference]:
    """Every measured figure of both probes, curves at the sizes where the first was measured."""
    found = []
    for before, after in zip(first.devices, second.devices, strict=True):
        figures = {f"{before.name} {n}": (f, after.flops.get(n)) for n, f in before.flops.items()}
        for field in ("bytes_per_s", "launch_s", "free_memory_bytes", "memory_bytes"):
            figures[f"{before.name} {field}"] = getattr(before, field), getattr(after, field)
        for name, (old, new) in figures.items():
            gap = abs(new.value - old.value) / old.value if new else float("inf")
            found.append(Difference(name, gap, old.spread or 1e-9))
    for before, after in zip(first.links, second.links, strict=True):
        for field in ("curve", "reduce_curve"):
            old, new = getattr(before, field), getattr(after, field)
            for num_bytes, seconds in old.points if old else ():
                gap = abs(new.seconds(num_bytes) - seconds) / seconds
                found.append(Difference(f"{before.a}-{before.b} {field} {num_bytes:g} B", gap, old.spread))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--probes", type=int, default=2)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    fleets, seconds = [], []
    for _ in range(given.probes):
        start = time.perf_counter()
        fleets.append(probe(quick=given.quick))
        seconds.append(time.perf_counter() - start)
        print(f"probed in {seconds[-1]:.1f} s; {fleets[-1].note}")
    found = [d for a, b in itertools.pairwise(fleets) for d in differences(a, b)]
    for d in sorted(found, key=lambda d: -d.ratio)[:12]:
        print(f"{d.name:40} differs by {d.difference:6.1%}, spread {d.spread:6.1%}")
    worst, outside = max(found, key=lambda d: d.ratio), sum(d.ratio > 1 for d in found)
    print(f"{outside} of {len(found)} figures lie outside of the printed spread")
    if given.json:
        summary = {"figures": len(found), "outside": outside, "worst": asdict(worst), "probe_s": max(seconds)}
        print(json.dumps(summary))
    return 1 if outside else 0


if __name__ == "__main__":
    raise SystemExit(main())
