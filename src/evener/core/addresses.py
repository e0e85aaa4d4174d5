"""Addresses as a person writes them."""

from evener.errors import UsageError


def host_and_port(text: str, *, example: str = "lab1:4711") -> tuple[str, int]:
    """HOST:PORT as host and port. Examples: "lab1:4711", "127.0.0.1:0" (any free port), "[::1]:8080".

    UsageError with `example` for anything else: without a host a server would be open to everybody.
    """
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or len(port) > 5 or int(port) > 65535:
        raise UsageError(f"{text!r} is no HOST:PORT", remedy=f"for example {example}")
    return host, int(port)
