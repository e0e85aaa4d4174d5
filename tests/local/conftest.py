import pytest

from tests.local.pool import Pool, start_pool_server


@pytest.fixture(scope="session", autouse=True)
def fork_server() -> None:
    """Begun with the first test, so that whoever asks for processes first finds it loaded with all of it."""
    start_pool_server()


@pytest.fixture(scope="session")
def pool(fork_server: None) -> Pool:
    return Pool()
