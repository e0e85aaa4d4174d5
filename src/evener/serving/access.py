"""Who may look: a token where strangers could ask, and on loopback only those who mean this machine."""

import hmac
import ipaddress
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from typing import Literal

from evener.errors import UsageError

TOKEN_VARIABLE = "EVENER_TOKEN"
LEAST_TOKEN = 16


@dataclass(frozen=True)
class Answer:
    """What a request gets: "allow", "enter" (the token was in the address: a cookie takes its place), or
    an HTTP status and the sentence why not.
    """

    do: Literal["allow", "enter", "refuse"]
    status: int = 200
    why: str = ""


ALLOW = Answer("allow")


@dataclass(frozen=True, kw_only=True)
class Access:
    """Decides on requests. Without a `token` only requests to a name of this machine's loopback are allowed:
    a page of another site that had its name point here would carry that name.

    `session` is what the cookie holds instead of the token, new in every process.
    """

    token: str | None
    cookie: str = "evener"
    session: str = field(default_factory=lambda: secrets.token_urlsafe(24))

    def answer(self, *, host: str, authorization: str, cookies: str, token: str | None) -> Answer:
        """The answer to a request with these headers and this ?token=."""
        if self.token is None:
            if is_loopback(_name_of(host)):
                return ALLOW
            return Answer("refuse", 403, f"this view is for this machine alone, not for {host[:80]!r}")
        if token is not None:
            return Answer("enter") if self._same(token, self.token) else _WRONG
        scheme, _, given = authorization.partition(" ")
        if given and scheme.lower() == "bearer":
            return ALLOW if self._same(given.strip(), self.token) else _WRONG
        held = _cookie(cookies, self.cookie)
        if held is not None:
            return ALLOW if self._same(held, self.session) else _MISSING
        return _MISSING

    @staticmethod
    def _same(given: str, wanted: str) -> bool:
        """Whether both are equal, in a time that does not tell where they differ."""
        return hmac.compare_digest(given.encode(errors="replace"), wanted.encode())


_MISSING = Answer("refuse", 401, "a token is needed: the address that was printed, or Authorization: Bearer")
_WRONG = Answer("refuse", 403, "this is not the token")


def _cookie(header: str, name: str) -> str | None:
    try:
        morsel = SimpleCookie(header).get(name)
    except CookieError:
        return None
    return morsel.value if morsel else None


def _name_of(host: str) -> str:
    """The name in a Host header. Examples: "localhost:80" is "localhost", "[::1]:80" is "::1"."""
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]


def is_loopback(name: str) -> bool:
    """Whether `name` is this machine to itself: localhost, 127.0.0.0/8 or ::1."""
    if name.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def token_for(host: str, make: Callable[[], str] = lambda: secrets.token_urlsafe(24)) -> str | None:
    """The token for a server bound to `host`: EVENER_TOKEN, else none on loopback, else a new one.

    It is no option of the command line, which every user of a machine can list. UsageError for one that is
    too short to withstand guessing.
    """
    given = os.environ.get(TOKEN_VARIABLE)
    if given is None:
        return None if is_loopback(host) else make()
    if len(given) < LEAST_TOKEN:
        raise UsageError(
            f"{TOKEN_VARIABLE} has {len(given)} characters, at least {LEAST_TOKEN} are needed",
            remedy=f"leave {TOKEN_VARIABLE} out: a new token is made and printed",
        )
    return given
