"""A real browser without a window: Chromium, driven through its DevTools protocol.

It is what the machine has, or Debian's package, which is installed on first use where this process may.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import itertools
import json
import os
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.real import processes
from tests.real.processes import wait_until

PACKAGE = "chromium-headless-shell"
_NAMES = (PACKAGE, "chromium", "chromium-browser", "google-chrome")
_SIZE = (1400, 1000)
_LOCK = Path("/tmp/llm-prefetch-tests-browser.lock")


@contextlib.contextmanager
def browser() -> Iterator[Page]:
    """Run a browser with one empty page, and a profile that ends with it.

    Raises:
        RuntimeError: there is none and it cannot be installed, or it does not come up; the message says why.
    """
    program = _program()
    with processes.scratch("browser") as area:
        profile = area.path / "profile"
        argv = [program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        argv += ["--hide-scrollbars", f"--window-size={_SIZE[0]},{_SIZE[1]}", "--lang=en-US"]
        # No page may ask the world for anything: only addresses are reached, no names.
        argv += ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE 10.*"]
        argv += ["--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"]
        port = profile / "DevToolsActivePort"

        def ready() -> bool:
            return port.exists() and port.read_text().count("\n") > 0

        env = {"HOME": str(area.path)}
        with processes.process(argv, area=area, name="browser", env=env, ready=ready, grace=2.0):
            yield from _page(port.read_text().split()[0])


def _page(port: str) -> Iterator[Page]:
    from websockets.sync.client import connect

    with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=30) as answer:
        (url,) = [each["webSocketDebuggerUrl"] for each in json.load(answer) if each["type"] == "page"]
    with connect(url, max_size=None) as socket:
        yield Page(socket)


@dataclass(frozen=True)
class Page:
    """The one page of a browser."""

    _socket: Any
    _ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def open(self, url: str) -> None:
        """Go there; what a script of the page builds is waited for with `shows`."""
        self._ask("Page.navigate", url=url)

    @property
    def text(self) -> str:
        """What a person reads on it."""
        return str(self.run("document.body ? document.body.innerText : ''"))

    @property
    def values(self) -> list[str]:
        """What its fields hold."""
        return list(self.run("[...document.querySelectorAll('input, textarea')].map(e => e.value)"))

    def shows(self, *texts: str, within: float = 60.0) -> None:
        """Wait until all of these texts are on the page, with whatever space between their words.

        Raises:
            RuntimeError: they are not `within` so many seconds; the message says which, and holds what is.
        """
        missing = list(texts)

        def complete() -> bool:
            shown = " ".join(self.text.split())
            missing[:] = [text for text in texts if text not in shown]
            return not missing

        try:
            wait_until(complete, within, "the page shows all")
        except RuntimeError as error:
            raise RuntimeError(f"the page does not show {missing}; it shows:\n{self.text}") from error

    def click(self, text: str, tag: str = "*", within: float = 60.0) -> None:
        """Click, with the mouse, in the middle of the innermost `tag` that shows exactly this text.

        Raises:
            RuntimeError: there is none `within` so many seconds; the message holds what is there.
        """
        find = f"""(() => {{
            const found = [...document.querySelectorAll({json.dumps(tag)})].filter(
                e => e.innerText && e.innerText.trim() === {json.dumps(text)} && e.getClientRects().length);
            if (!found.length) return null;
            found.at(-1).scrollIntoView({{block: "center"}});
            const box = found.at(-1).getBoundingClientRect();
            return [box.x + box.width / 2, box.y + box.height / 2];
        }})()"""
        seen: list[Any] = [None, None]

        def stands_still() -> bool:
            seen[:] = [seen[1], self.run(find)]
            return seen[1] is not None and seen[0] == seen[1]

        try:
            wait_until(stands_still, within, f"the page has {tag} {text!r}")
        except RuntimeError as error:
            raise RuntimeError(f"{error}; it shows:\n{self.text}") from None
        x, y = seen[1]
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self._ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression.

        Raises:
            RuntimeError: it threw.
        """
        answer = self._ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """Write what is in the window to a PNG."""
        path.write_bytes(base64.b64decode(self._ask("Page.captureScreenshot", format="png")["data"]))

    def _ask(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._ids)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            answer = json.loads(self._socket.recv(timeout=60))
            if answer.get("id") != number:
                continue
            if "error" in answer:
                raise RuntimeError(f"{method}: {answer['error']['message']}")
            return dict(answer["result"])


def _program() -> str:
    """A browser of this machine, installed if need be."""
    found = _found()
    if found is None and os.geteuid() == 0 and shutil.which("apt-get"):
        with _LOCK.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # workers of one run start together
            if _found() is None:
                _install()
        found = _found()
    if found is None:
        raise RuntimeError(f"the tests need a browser: install Debian's {PACKAGE}, or put chromium on PATH")
    return found


def _found() -> str | None:
    return next((found for name in _NAMES if (found := shutil.which(name))), None)


def _install() -> None:
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for argv in (["update"], ["install", "--yes", "--no-install-recommends", PACKAGE, "fonts-dejavu-core"]):
        try:
            processes.run(["apt-get", *argv], env=env, timeout=240.0)
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"apt-get {argv[0]} took more than 240 s; check its sources") from error
