"""A headless Chromium, driven by the DevTools protocol over a pipe."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

WAIT_S = 120.0  # for an answer of the browser on a loaded machine


def find_chromium() -> str | None:
    """Return the path of an installed Chromium, None if there is none."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """One tab. `errors` has exceptions and errors on the console of all pages."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self._read, self._write = read_fd, write_fd
        self._buffer = b""
        self._number = 0
        self.errors: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        return self._call(method, self._session, **params)

    def _call(self, method: str, session: str | None = None, **params: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], WAIT_S)
            assert ready, "the browser does not answer"
            data = os.read(self._read, 1 << 20)
            assert data, "the browser has ended"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        event = json.loads(line)
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(event["params"]["exceptionDetails"])[:500])
            case "Runtime.consoleAPICalled" if event["params"]["type"] == "error":
                self.errors.append(json.dumps(event["params"]["args"])[:500])
            case "Log.entryAdded" if event["params"]["entry"]["level"] == "error":
                self.errors.append(json.dumps(event["params"]["entry"])[:500])
        return event

    def evaluate(self, script: str) -> Any:
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait_for(self, condition: str) -> Any:
        """Return the value of a script once it is true."""
        end = time.monotonic() + WAIT_S
        while not (value := self.evaluate(condition)):
            assert time.monotonic() < end, (condition, self.errors, self.evaluate("document.body.innerText")[:2000])
            time.sleep(0.05)
        return value

    def go(self, url: str, condition: str = "true") -> None:
        self.call("Page.navigate", url=url)
        self.wait_for(f"document.readyState === 'complete' && ({condition})")

    def size(self, width: int, height: int = 1000) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def dark(self, is_dark: bool) -> None:
        value = "dark" if is_dark else "light"
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": value}])

    def press(self, key: str) -> None:
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, text=key if len(key) == 1 else "")
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)


@contextlib.contextmanager
def open_browser(folder: Path, chromium: str) -> Generator[Browser]:
    """Start Chromium with its profile in `folder`."""
    to_read, to_write = os.pipe(), os.pipe()  # of the browser: it reads from the first
    command = [
        chromium, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        "--remote-debugging-pipe", f"--user-data-dir={folder}", "about:blank",
    ]  # fmt: skip
    script = f'exec "$@" 3<&{to_read[0]} 4>&{to_write[1]}'
    process = subprocess.Popen(
        ["bash", "-c", script, "bash", *command],
        pass_fds=(to_read[0], to_write[1]),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_read[0])
    os.close(to_write[1])
    try:
        yield Browser(to_write[0], to_read[1])
    finally:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(to_write[0])
        os.close(to_read[1])
