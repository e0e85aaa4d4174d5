"""The live view over real sockets on loopback: who gets in, and with which headers."""

import http.client
import re
import socket

import pytest

from evener.errors import EnvironmentBrokenError
from evener.serving.server import LiveServer, reached_at
from tests.unit.report.page.runs import run_folder

TOKEN = "a-token-of-enough-length"


def get(server: LiveServer, path: str, method: str = "GET", **headers: str):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.request(method, path, headers={k.replace("_", "-"): v for k, v in headers.items()})
    response = connection.getresponse()
    body = response.read()
    connection.close()
    return response.status, dict(response.getheaders()), body


@pytest.fixture
def run(tmp_path):
    return run_folder(tmp_path / "run")


@pytest.fixture
def local(run, monkeypatch):
    monkeypatch.delenv("EVENER_TOKEN", raising=False)
    said: list[str] = []
    with LiveServer(run, "127.0.0.1:0", said.append) as server:
        server.said = said
        yield server


@pytest.fixture
def guarded(run, monkeypatch):
    monkeypatch.setenv("EVENER_TOKEN", TOKEN)
    said: list[str] = []
    with LiveServer(run, "127.0.0.1:0", said.append) as server:
        server.said = said
        yield server


def test_on_loopback_the_page_is_open_and_says_where(local) -> None:
    status, headers, body = get(local, "/")
    assert status == 200 and b"evener" in body and local.said == [f"live view: {local.url}"]
    assert headers["content-type"].startswith("text/html")
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff" and headers["cache-control"] == "no-store"
    assert "server" not in headers and "access-control-allow-origin" not in headers


def test_a_page_of_another_site_gets_nothing(local) -> None:
    for path in ("/", "/events", "/metrics"):
        assert get(local, path, Host="rebound.example")[0] == 403


def test_prometheus_reads_the_metrics(local) -> None:
    status, headers, body = get(local, "/metrics")
    text = body.decode()
    assert status == 200 and headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "evener_steps_total 10.0" in text and "evener_loss 4.6" in text
    assert 'evener_device_seconds{cause="compute",device="lab/b"} 1.05' in text
    assert re.search(r"evener_efficiency_ratio 0\.818", text)


def test_there_is_nothing_else(local) -> None:
    assert get(local, "/../../etc/passwd")[0] == 404 and get(local, "/model.safetensors")[0] == 404
    assert get(local, "/", method="POST")[0] == 405


def test_without_the_token_nothing_is_told(guarded) -> None:
    for path in ("/", "/events", "/metrics", "/nothing"):
        status, headers, body = get(guarded, path)
        assert status == 401 and headers["www-authenticate"] == "Bearer"
        assert b"lab" not in body and TOKEN.encode() not in body
        assert get(guarded, path + "?token=wrong")[0] == 403
        assert get(guarded, path, Authorization="Bearer wrong")[0] == 403


def test_the_token_is_exchanged_for_a_cookie_that_scripts_and_other_sites_do_not_get(guarded) -> None:
    assert guarded.said == [f"live view: {guarded.url}?token={TOKEN}"]
    status, headers, _ = get(guarded, f"/?token={TOKEN}")
    assert status == 303 and headers["location"] == "/"
    cookie = headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=strict" in cookie and TOKEN not in cookie
    assert get(guarded, "/", Cookie=cookie.partition(";")[0])[0] == 200
    assert get(guarded, "/metrics", Authorization=f"Bearer {TOKEN}")[0] == 200


def test_a_location_stays_on_this_server(guarded) -> None:
    status, headers, _ = get(guarded, f"//evil.example/?token={TOKEN}&a=1")
    assert status in (303, 404)
    assert not headers.get("location", "/").startswith("//")


def test_before_the_plan_there_is_a_page_that_asks_again(tmp_path) -> None:
    with LiveServer(tmp_path, "127.0.0.1:0", lambda s: None) as server:
        status, headers, body = get(server, "/")
        assert status == 503 and headers["refresh"] == "2" and b"no plan yet" in body
        assert get(server, "/metrics")[0] == 503


def test_an_address_that_is_taken_is_an_error_with_a_remedy(run) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(EnvironmentBrokenError, match="cannot listen at"):
            LiveServer(run, f"127.0.0.1:{taken.getsockname()[1]}")


def test_the_address_that_is_told_can_be_opened() -> None:
    """Story: http://0.0.0.0:8080/ was printed, which no other host can open."""
    for host in ("127.0.0.1", "lab1", "10.0.0.7", "::1"):
        assert reached_at(host) == host
    for host in ("0.0.0.0", "::"):
        assert reached_at(host) and reached_at(host) != host
