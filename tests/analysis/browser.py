"""Headless Chromium over its debugging pipe: pages are opened at a size, keys pressed, and what is shown is read."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
KEYS = {
    "Space": (" ", 32), "ArrowRight": ("ArrowRight", 39), "ArrowLeft": ("ArrowLeft", 37), "Tab": ("Tab", 9),
    "ArrowUp": ("ArrowUp", 38), "ArrowDown": ("ArrowDown", 40),
}  # fmt: skip


def find_browser() -> str:
    """Its path; without one the test is skipped."""
    browser = next((found for found in map(shutil.which, NAMES) if found), None)
    if browser is None:
        pytest.skip("needs Chromium or Chrome on the PATH")
    return browser


class Tab:
    """One page in a browser that takes commands from `commands` and answers on `answers`."""

    def __init__(self, commands: int, answers: int) -> None:
        self.commands, self.answers, self.session, self.sent = commands, answers, "", 0
        self.rest, self.problems = b"", list[str]()  # errors of scripts and lines of the console
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The answer to a command; events that come before it are noted."""
        self.sent += 1
        message = {"id": self.sent, "method": method, "params": params}
        message |= {"sessionId": self.session} if self.session else {}
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self.sent:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self.rest:
            part = os.read(self.answers, 2**16)
            assert part, "the browser has ended"
            self.rest += part
        text, _, self.rest = self.rest.partition(b"\0")
        message = json.loads(text)
        if message.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled"):
            self.problems.append(json.dumps(message["params"])[:500])
        return message

    def open(self, page: Path | str, width: int, height: int = 800, still: bool = False, dark: bool = False) -> None:
        """Opens a page, a file or an address, in a window of this size; with `still` its reader wants no motion."""
        self.show(width, height, still, dark)
        self.problems.clear()
        self.call("Page.navigate", url=page if isinstance(page, str) else page.as_uri())
        self.wait("document.readyState === 'complete' && document.body.dataset.ready === 'true'")

    def show(self, width: int, height: int = 800, still: bool = False, dark: bool = False) -> None:
        """Makes the window so large, and its reader wish that."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        wishes = {"reduced-motion": "reduce" if still else "", "color-scheme": "dark" if dark else "light"}
        media = [{"name": f"prefers-{name}", "value": value} for name, value in wishes.items()]
        self.call("Emulation.setEmulatedMedia", features=media)

    def ask(self, expression: str) -> Any:
        """The value of an expression in the page; a promise is waited for."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, expression: str) -> None:
        """Until an expression is true, looked at in every frame that the page draws."""
        look = f"const look = () => ({expression}) ? done(true) : requestAnimationFrame(look);"
        self.ask(f"new Promise((done, fail) => {{ setTimeout(() => fail('not within 60 s'), 60000); {look} look(); }})")

    def press(self, key: str) -> None:
        name, code = KEYS[key]
        pressed = {"key": name, "code": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", **pressed, **({"text": " "} if key == "Space" else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **pressed)

    def point(self, x: float, y: float, click: bool = False) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        for kind in ("mousePressed", "mouseReleased") if click else ():
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def picture(self, path: Path) -> None:
        """Writes a PNG of what the window shows."""
        path.write_bytes(b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


@contextmanager
def open_browser(profile: Path, *more: str) -> Iterator[Tab]:
    """A browser with a profile of its own, and with `more` flags."""
    browser = find_browser()
    (reads, commands), (answers, writes) = os.pipe(), os.pipe()
    # The browser expects the pipes under these numbers.
    start = f"import os, sys; os.dup2({reads}, 3); os.dup2({writes}, 4); os.execv(sys.argv[1], sys.argv[1:])"
    flags = [*FLAGS, *more, "--remote-debugging-pipe", f"--user-data-dir={profile}"]
    command = [sys.executable, "-c", start, browser, *flags]
    process = subprocess.Popen(command, pass_fds=(reads, writes), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    os.close(reads)
    os.close(writes)
    try:
        yield Tab(commands, answers)
    finally:
        os.close(commands)  # on which it ends
        process.wait(20)
        os.close(answers)
