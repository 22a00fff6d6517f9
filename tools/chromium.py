"""Drives a headless Chromium through its own debugging pipe: no driver, no port, no package."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

#: Waits half a minute until an expression of JavaScript holds.
WAIT = """(async () => { const end = Date.now() + 30000; let found;
  while (!(found = (%s)) && Date.now() < end) await new Promise((done) => setTimeout(done, 50));
  return found; })()"""
NAMES = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--mute-audio", "--hide-scrollbars",
    "--remote-debugging-pipe",
)


def find() -> str | None:
    """The browser on this machine."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page of a headless browser, started with further ``flags``; ``events`` is all that it told of so far."""

    def __init__(self, profile: Path, timeout: float = 60, flags: tuple[str, ...] = ()):
        self.timeout = timeout
        self.events: list[dict[str, Any]] = []
        self._number, self._buffer = 0, b""
        self._session: str | None = None
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        # Copies with high numbers: one of the pipes could be 3 or 4 itself.
        commands, answers = (fcntl.fcntl(handle, fcntl.F_DUPFD, 20) for handle in (to_browser, from_browser))

        def hand_over() -> None:  # Chromium reads commands from file 3 and answers on file 4
            os.dup2(commands, 3)
            os.dup2(answers, 4)

        program = find()
        assert program is not None, "there is no chromium here: apt-get install chromium"
        self._process = subprocess.Popen(
            [program, *_FLAGS, *flags, f"--user-data-dir={profile}", "about:blank"], preexec_fn=hand_over,
            close_fds=False, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for handle in (to_browser, from_browser, commands, answers):
            os.close(handle)
        target = next(one for one in self._wait_for_targets() if one["type"] == "page")
        self._session = self.send("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)

    def send(self, method: str, **params: Any) -> Any:
        """One command; its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._out, data):]
        until = time.monotonic() + self.timeout
        while True:
            answer = self._read(until)
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self.events.append(answer)

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression; a promise is waited for."""
        answer = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True,
                           userGesture=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def open(self, url: str, width: int = 1280, height: int = 900, dark: bool = False, phone: bool = False) -> None:
        """Load a page as a screen of that size shows it."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        self.send("Emulation.setEmulatedMedia",
                  features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])
        self.events.clear()
        self.send("Page.navigate", url=url)
        until = time.monotonic() + self.timeout
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._read(until))

    def told(self, method: str) -> list[dict[str, Any]]:
        """The parameters of all events of that kind since the page was opened."""
        self.run("1")
        return [event["params"] for event in self.events if event.get("method") == method]

    def picture(self, path: Path, whole: bool = True) -> None:
        """The page as a PNG: the whole of it, or what a screen shows."""
        shot = self.send("Page.captureScreenshot", captureBeyondViewport=whole)
        Path(path).write_bytes(base64.b64decode(shot["data"]))

    def _wait_for_targets(self) -> list[dict[str, Any]]:
        until = time.monotonic() + self.timeout
        while time.monotonic() < until:
            found = self.send("Target.getTargets")["targetInfos"]
            if any(one["type"] == "page" for one in found):
                return found
            time.sleep(0.1)
        raise AssertionError("the browser opened no page")

    def _read(self, until: float) -> Any:
        while b"\0" not in self._buffer:
            left = until - time.monotonic()
            assert left > 0 and select.select([self._in], [], [], left)[0], "the browser does not answer"
            data = os.read(self._in, 1 << 16)
            assert data, "the browser ended"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)
