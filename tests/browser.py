"""A real browser for tests: Debian's Chromium without a window, spoken to over a pipe (DevTools protocol)."""

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

INSTALL = "apt-get install -y chromium"
PATIENCE_S = 30.0


def find_chromium() -> str:
    """The browser's path; installs Debian's package as root, else fails with the line that would."""
    if not shutil.which("chromium") and os.geteuid() == 0 and shutil.which("apt-get"):
        line = f"{INSTALL} || {{ apt-get update -qq && {INSTALL}; }}"
        subprocess.run(line, shell=True, capture_output=True, timeout=900, check=False)
    return shutil.which("chromium") or pytest.fail(f"no browser to open pages with: {INSTALL}")


class Browser:
    """A running Chromium; `page` opens pages in it."""

    def __init__(self, folder: str) -> None:
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        flags = (
            "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run "
            "--disable-background-networking --disable-component-update --disable-sync --mute-audio "
            "--hide-scrollbars --force-device-scale-factor=1 --remote-debugging-pipe"
        )
        command = f"exec {find_chromium()} {flags} --user-data-dir={folder} 3<&{to_read} 4>&{to_write}"
        self.process = subprocess.Popen(
            ["bash", "-c", command],
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self._buffer, self._number = b"", 0
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """The result of a method of the protocol."""
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            answer = self.receive(end - time.monotonic())
            if answer is not None and answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
        raise TimeoutError(f"the browser did not answer {method} within {PATIENCE_S} s")

    def receive(self, seconds: float) -> dict[str, Any] | None:
        """The next message, None after `seconds` without one; events are also kept."""
        while b"\0" not in self._buffer:
            if not select.select([self._read], [], [], max(0.0, seconds))[0]:
                return None
            part = os.read(self._read, 2**20)
            assert part, "the browser ended"
            self._buffer += part
        raw, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(raw)
        if "method" in message:
            self.events.append(message)
        return message

    def page(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> "Page":
        """A new page of that size, loaded."""
        return Page(self, url, width, height, dark=dark)

    def close(self) -> None:
        os.close(self._write)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self._read)


class Page:
    """One page, with everything it asked for and complained about."""

    def __init__(self, browser: Browser, url: str, width: int, height: int, *, dark: bool) -> None:
        self._browser = browser
        target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        self.target = target
        self._session = browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete'")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def resize(self, width: int, height: int) -> None:
        mobile = width < 600
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=mobile,
        )

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait_for(self, expression: str, seconds: float = PATIENCE_S) -> Any:
        """The value of `expression` once it is true."""
        end = time.monotonic() + seconds
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < end, f"not true within {seconds} s: {expression}"
            self._browser.receive(0.05)
        return value

    def screenshot(self, path: Path) -> None:
        """The whole page as a PNG file."""
        height = self.evaluate("document.documentElement.scrollHeight")
        width = self.evaluate("innerWidth")
        clip = {"x": 0, "y": 0, "width": width, "height": min(height, 12_000), "scale": 1}
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _mine(self, method: str) -> list[dict[str, Any]]:
        events = self._browser.events
        return [e["params"] for e in events if e["method"] == method and e.get("sessionId") == self._session]

    @property
    def requests(self) -> list[str]:
        """Every address that the page asked for, without what is inside the page itself."""
        urls = [e["request"]["url"] for e in self._mine("Network.requestWillBeSent")]
        return [url for url in urls if not url.startswith("data:")]

    @property
    def complaints(self) -> list[str]:
        """Errors and warnings of the console, exceptions, and breaches of the page's policy."""
        said = [e["exceptionDetails"]["text"] for e in self._mine("Runtime.exceptionThrown")]
        for e in self._mine("Runtime.consoleAPICalled"):
            if e["type"] in ("error", "warning", "assert"):
                said.append(f"console: {e['args']}")
        said += [e["entry"]["text"] for e in self._mine("Log.entryAdded")]
        return said

    def close(self) -> None:
        self._browser.call("Target.closeTarget", targetId=self.target)


@contextmanager
def running_browser() -> Iterator[Browser]:
    """A browser with a profile of its own, ended at the end."""
    with tempfile.TemporaryDirectory(prefix="evener-browser-", ignore_cleanup_errors=True) as folder:
        browser = Browser(folder)
        try:
            yield browser
        finally:
            browser.close()
