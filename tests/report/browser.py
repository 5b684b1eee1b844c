"""Headless Chromium, driven through the pipe of its DevTools protocol: no package beyond the standard library."""

from __future__ import annotations

import base64
import json
import os
import select
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

PATIENCE_S = 60


class Browser:
    """One process with one page. ``messages`` are the script errors, policy violations and requests it told of."""

    def __init__(self, program: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="tilewise-chromium", ignore_cleanup_errors=True)
        to_read, self._out = os.pipe()
        self._in, to_write = os.pipe()
        # Chromium reads commands from file descriptor 3 and answers on 4.
        command = [program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
                   "--remote-debugging-pipe", "--disable-background-networking", "--hide-scrollbars",
                   f"--user-data-dir={self._folder.name}"]  # fmt: skip
        wrapped = ["bash", "-c", f'exec 3<&{to_read} 4>&{to_write}; exec "$@"', "bash", *command]
        self._process = subprocess.Popen(
            wrapped, pass_fds=(to_read, to_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(to_read)
        os.close(to_write)
        self._buffer, self._number, self._session = b"", 0, ""
        self.messages: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.wait(PATIENCE_S)
        os.close(self._in)
        os.close(self._out)
        self._folder.cleanup()

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Run a command of the protocol and wait for what it gives."""
        self._number += 1
        command = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            command["sessionId"] = self._session
        os.write(self._out, json.dumps(command).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return dict(answer["result"])
            self._note(answer)

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + PATIENCE_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, end - time.monotonic()))
            assert ready, "chromium does not answer"
            more = os.read(self._in, 2**20)
            assert more, "chromium ended"
            self._buffer += more
        text, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(text))

    def _note(self, event: dict[str, Any]) -> None:
        method, told = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.messages.append(f"exception: {told['exceptionDetails']['text']}")
        elif method == "Log.entryAdded":
            self.messages.append(f"log: {told['entry']['text']}")
        elif method == "Runtime.consoleAPICalled":
            self.messages.append(f"console: {told['args']}")
        elif method == "Network.requestWillBeSent":
            self.messages.append(f"request: {told['request']['url'][:200]}")

    def open(self, path: Path, width: int, height: int = 900, scheme: str = "light", script: bool = True) -> None:
        """Load a page in a window of ``width`` x ``height`` CSS pixels."""
        mobile = width < 500
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        self.media(scheme)
        self.send("Emulation.setScriptExecutionDisabled", value=not script)
        self.send("Page.navigate", url=path.as_uri())
        end = time.monotonic() + PATIENCE_S
        while not self.run(
            f"document.readyState === 'complete' && location.href.split('#')[0] === {json.dumps(path.as_uri())}"
        ):
            assert time.monotonic() < end, f"{path} does not load"
        url = f"request: {path.as_uri()}"
        self.messages = [message for message in self.messages if message != url]

    def media(self, scheme: str, medium: str = "") -> None:
        """Prefer ``light`` or ``dark``; show as on the screen or as in ``print``."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.send("Emulation.setEmulatedMedia", media=medium, features=features)

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression, as JSON has it."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def soon(self, expression: str) -> bool:
        """Whether a JavaScript expression becomes true: what a click leads to may come after it."""
        end = time.monotonic() + PATIENCE_S
        while not (found := bool(self.run(expression))) and time.monotonic() < end:
            time.sleep(0.02)
        return found

    def click(self, selector: str) -> None:
        """A click of the mouse on the middle of an element, scrolled into view."""
        found = json.dumps(selector)
        self.run(f"document.querySelector({found}).scrollIntoView({{block: 'center', behavior: 'instant'}})")
        box = self.run(
            f"(r => [r.x + r.width / 2, r.y + r.height / 2])(document.querySelector({found}).getBoundingClientRect())"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def press(self, key: str, code: int, text: str = "") -> None:
        """A key, down and up."""
        for kind in ("keyDown", "keyUp"):
            more = {"text": text} if text and kind == "keyDown" else {}
            self.send("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **more)

    def picture(self, path: Path, whole: bool = True, clip: dict[str, float] | None = None) -> None:
        """A screenshot as PNG."""
        more = {"clip": {**clip, "scale": 1}} if clip else {}
        data = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole or bool(clip), **more)[
            "data"
        ]
        path.write_bytes(base64.b64decode(data))
