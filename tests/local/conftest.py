import pytest

from tests.local.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Pool:
    """The warm pool: its server loads torch with the first test that asks for processes."""
    return Pool()
