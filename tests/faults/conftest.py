from tests.local.conftest import fork_server  # noqa: F401
