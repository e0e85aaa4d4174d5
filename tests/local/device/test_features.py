"""What programs do with a device works on the rehearsal device, each in a process of its own."""

import pytest

from tests.local.device.checks import CHECKS
from tests.local.device.opening import card_of
from tests.local.pool import Pool


def run_checks(rank: int, world_size: int, names: tuple[str, ...]) -> dict[str, str]:
    import traceback

    card_of()
    failed = {}
    for name in names:
        try:
            CHECKS[name]("rehearsal")
        except Exception:
            failed[name] = traceback.format_exc()
    return failed


@pytest.fixture(scope="module")
def failed(pool: Pool) -> dict[str, str]:
    (found,) = pool.run(run_checks, 1, tuple(CHECKS))
    return found


@pytest.mark.parametrize("name", CHECKS)
def test_works_on_the_rehearsal_device(failed: dict[str, str], name: str) -> None:
    assert name not in failed, failed[name]
