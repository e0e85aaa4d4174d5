"""Everything that looks on while a run goes on, opened and closed together."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from evener.core.tell import tell
from evener.errors import EnvironmentBrokenError
from evener.serving.writers import Relay, open_writers


@contextmanager
def watching(
    folder: str | Path, *, listen: str | None, log_to: Sequence[str], say: Callable[[str], None] | None = None
) -> Iterator[None]:
    """While this is open the run in `folder` is served at `listen` ("host:port") and written to `log_to`.

    Threads of this process do it. EnvironmentBrokenError for a package that is missing, an address that is
    taken; UsageError for a log that is unknown.
    """
    with ExitStack() as stack:
        if log_to:
            stack.enter_context(Relay(folder, open_writers(log_to, Path(folder)), say=say or tell))
        if listen is not None:
            try:
                from evener.serving.server import LiveServer
            except ImportError as e:
                raise EnvironmentBrokenError(
                    f"the live view needs a package: {e}", remedy="pip install 'evener[web]'"
                ) from e
            stack.enter_context(LiveServer(folder, listen, say or tell))
        yield
