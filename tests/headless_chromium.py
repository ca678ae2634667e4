"""Drives a headless Chromium by its DevTools protocol over a pipe, for tests of pages.

In: the path of a browser. Out: values of JavaScript expressions evaluated in a page. It needs no driver and no package.
"""

import contextlib
import itertools
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
)


class Page:
    """One open page."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands = commands
        self._answers = answers
        self._held = b""
        self._numbers = itertools.count(1)
        self._session: str | None = None

    def open(self, url: str) -> None:
        """Open `url`, and wait until it is loaded."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.enable")
        self.call("Page.navigate", url=url)
        while self._next().get("method") != "Page.loadEventFired":
            pass

    def value(self, expression: str) -> Any:
        """The value of an expression, or what its promise comes to."""
        found = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def call(self, method: str, **parameters: Any) -> Any:
        """The result of a command of the protocol."""
        number = next(self._numbers)
        command = {"id": number, "method": method, "params": parameters}
        os.write(self._commands, json.dumps(command | ({"sessionId": self._session} if self._session else {})).encode())
        os.write(self._commands, b"\0")
        while (answer := self._next()).get("id") != number:
            pass
        assert "error" not in answer, answer
        return answer["result"]

    def _next(self) -> Any:
        while b"\0" not in self._held:
            piece = os.read(self._answers, 1 << 16)
            assert piece, "the browser has ended"
            self._held += piece
        message, _, self._held = self._held.partition(b"\0")
        return json.loads(message)


@contextlib.contextmanager
def browsing(browser: Path, profile: Path) -> Iterator[Page]:
    """A browser with an empty profile in the folder `profile`; ended at the end."""
    commands_out, commands_in = os.pipe()
    answers_out, answers_in = os.pipe()
    shell = f'exec "$@" 3<&{commands_out} 4>&{answers_in}'  # the numbers that Chromium reads and writes
    command = ["bash", "-c", shell, "browser", str(browser), *_OPTIONS, f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(command, pass_fds=(commands_out, answers_in), stderr=subprocess.DEVNULL)
    os.close(commands_out)
    os.close(answers_in)
    page = Page(commands_in, answers_out)
    try:
        yield page
        page._session = None
        page.call("Browser.close")
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=20)
        process.kill()
        process.wait()
        os.close(commands_in)
        os.close(answers_out)
