"""A headless Chromium that shows one page at a time, driven over its debugging pipe: no driver, no network."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """Starts the browser with its profile in `profile`, and ends it."""

    def __init__(self, profile: Path):
        into, self._requests = os.pipe()
        self._answers, out = os.pipe()
        # Chromium reads its commands from descriptor 3 and answers on 4.
        command = f'exec "$0" "$@" 3<&{into} 4>&{out}'
        self._process = subprocess.Popen(
            [
                "/bin/bash", "-c", command, CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu",
                "--remote-debugging-pipe", "--no-first-run", "--disable-background-networking", "--disable-sync",
                f"--user-data-dir={profile}", "about:blank",
            ],
            pass_fds=(into, out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(into)
        os.close(out)
        self._buffer = b""
        self._next = 0
        self._session = None
        self.events = []
        [page] = [each for each in self.call("Target.getTargets")["targetInfos"] if each["type"] == "page"]
        attached = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self):
        os.close(self._requests)
        os.close(self._answers)
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def call(self, method, **parameters):
        """The result of one command; events that come meanwhile are kept in `events`."""
        self._next += 1
        message = {"id": self._next, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._requests, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != self._next:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def open(self, path: Path, width: int, *, dark: bool = False, media: str = "screen"):
        """Show a file, and wait until it is loaded; `events` then holds what happened since, and of no page before."""
        self._navigate("about:blank")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media=media, features=[scheme])
        self._navigate(path.as_uri())

    def evaluate(self, expression):
        """The value of a JavaScript expression."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def _navigate(self, url):
        self.events.clear()
        self.call("Page.navigate", url=url)
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._receive())

    def _receive(self):
        while b"\0" not in self._buffer:
            more = os.read(self._answers, 1 << 16)
            assert more, "the browser ended"
            self._buffer += more
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)
