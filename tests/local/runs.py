"""Runs of a script under a plan, for tests: on CPUs of one thread, in a folder of the test's own."""

from pathlib import Path
from typing import Any

from evener.core.fleet import Device, Fleet
from evener.core.plan import Plan
from evener.session.exactness.verify import Exactness, verify
from evener.session.request import Request


def cpus(names: tuple[str, ...]) -> Fleet:
    return Fleet(devices=tuple(Device(name=n, kind="cpu", threads=1) for n in names))


def run_of(folder: Path, text: str, plan: Plan, **wishes: Any) -> Request:
    """The script `text` under `plan`; `fleet` among the wishes where the plan does not use all of it."""
    script = folder / "job.py"
    script.write_text(text, encoding="utf-8")
    wishes.setdefault("fleet", cpus(tuple(sorted(plan.devices))))
    return Request(script=str(script), run_dir=str(folder), plan=plan, quiet=True, **wishes)


def verified(request: Request) -> Exactness:
    """What verify finds, which is exact."""
    result = verify(request)
    assert result is not None
    assert result.exact, result
    return result
