"""Who may look at a run: decided without a server."""

import pytest

from evener.errors import UsageError
from evener.serving import access
from evener.serving.access import Access, is_loopback, token_for

TOKEN = "a-token-of-enough-length"
OPEN = Access(token=None)
CLOSED = Access(token=TOKEN, cookie="evener_80", session="what-the-cookie-holds")


def ask(who: Access, *, host: str = "lab1:80", authorization: str = "", cookies: str = "", token=None):
    return who.answer(host=host, authorization=authorization, cookies=cookies, token=token)


@pytest.mark.parametrize("host", ["127.0.0.1:8080", "localhost", "LOCALHOST:1", "[::1]:8080", "127.8.8.8"])
def test_without_a_token_this_machine_may_look(host: str) -> None:
    assert ask(OPEN, host=host).do == "allow"


@pytest.mark.parametrize("host", ["evil.example:8080", "", "127.0.0.1.evil.example", "10.0.0.1", "[::2]:80"])
def test_a_name_that_was_pointed_here_may_not(host: str) -> None:
    answer = ask(OPEN, host=host)
    assert (answer.do, answer.status) == ("refuse", 403)


def test_the_right_token_enters_by_address_header_or_cookie() -> None:
    assert ask(CLOSED, token=TOKEN).do == "enter"
    assert ask(CLOSED, authorization=f"Bearer {TOKEN}").do == "allow"
    assert ask(CLOSED, authorization=f"bearer  {TOKEN}").do == "allow"
    assert ask(CLOSED, cookies="other=1; evener_80=what-the-cookie-holds").do == "allow"


@pytest.mark.parametrize(
    ("given", "status"),
    [
        ({}, 401),
        ({"host": "127.0.0.1"}, 401),
        ({"token": ""}, 403),
        ({"token": TOKEN[:-1]}, 403),
        ({"token": TOKEN + "x"}, 403),
        ({"token": "ünïcödé\ud800"}, 403),
        ({"authorization": "Bearer wrong"}, 403),
        ({"authorization": f"Basic {TOKEN}"}, 401),
        ({"cookies": "evener_80=wrong"}, 401),
        ({"cookies": f"evener_80={TOKEN}"}, 401),
        ({"cookies": f"evener={TOKEN}"}, 401),
        ({"cookies": "evener_80=\x00;;;===\ud800"}, 401),
    ],
)
def test_a_wrong_or_missing_token_is_refused(given: dict, status: int) -> None:
    answer = ask(CLOSED, **given)
    assert (answer.do, answer.status) == ("refuse", status) and answer.why


def test_tokens_are_compared_in_constant_time(monkeypatch) -> None:
    seen = []
    monkeypatch.setattr(access.hmac, "compare_digest", lambda a, b: seen.append((a, b)) or a == b)
    ask(CLOSED, token="x")
    ask(CLOSED, authorization="Bearer y")
    ask(CLOSED, cookies="evener_80=z")
    assert [a for a, _ in seen] == [b"x", b"y", b"z"]


def test_every_process_has_a_cookie_of_its_own() -> None:
    assert Access(token=TOKEN).session != Access(token=TOKEN).session


def test_a_token_is_made_only_where_strangers_could_ask(monkeypatch) -> None:
    monkeypatch.delenv("EVENER_TOKEN", raising=False)
    assert token_for("127.0.0.1") is None and token_for("localhost") is None
    assert token_for("0.0.0.0", lambda: "new") == "new" and token_for("lab1", lambda: "new") == "new"
    assert len(token_for("0.0.0.0")) >= 32
    monkeypatch.setenv("EVENER_TOKEN", TOKEN)
    assert token_for("127.0.0.1") == TOKEN == token_for("0.0.0.0")
    monkeypatch.setenv("EVENER_TOKEN", "short")
    with pytest.raises(UsageError, match="5 characters"):
        token_for("0.0.0.0")


def test_what_loopback_is() -> None:
    assert not is_loopback("0.0.0.0") and not is_loopback("lab1") and is_loopback("::1")
