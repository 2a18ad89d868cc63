"""A headless Chromium, driven over chromedriver's HTTP interface (W3C WebDriver)."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from harness.ports import free_port
from harness.wait import PATIENCE_S, wait_until

TAB = "\ue004"
_CENTER = """
const element = document.querySelector(arguments[0]);
element.scrollIntoView({ block: "center" });
const box = element.getBoundingClientRect();
return { x: Math.round(box.x + box.width / 2), y: Math.round(box.y + box.height / 2) };
"""
#: Texts whose contrast with their background is below 4.5 (WCAG 2.2, AA).
_FAINT_TEXTS = """
const parse = (color) => color.match(/[\\d.]+/g).map(Number);
const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
  .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
  .reduce((sum, c, index) => sum + c * [0.2126, 0.7152, 0.0722][index], 0);
const background = (element) => {
  for (let each = element; each; each = each.parentElement) {
    const color = parse(getComputedStyle(each).backgroundColor);
    if (color.length === 3 || color[3] === 1) return color;
  }
  return [255, 255, 255];
};
const faint = [];
for (const element of document.querySelectorAll("body *")) {
  const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
  if (!own || !element.checkVisibility() || element.closest(".hidden, .skip, svg, option")) continue;
  const [a, b] = [light(parse(getComputedStyle(element).color)), light(background(element))].sort((x, y) => y - x);
  if ((a + 0.05) / (b + 0.05) < 4.5) faint.push(element.outerHTML.slice(0, 120));
}
return faint;
"""
_OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")


class Browser:
    """One window."""

    def __init__(self, port: int, session: str) -> None:
        self._port = port
        self._session = session

    def open(self, url: str) -> None:
        """Open a page and wait until it is loaded."""
        self._call("POST", "/url", {"url": url})

    @property
    def url(self) -> str:
        return str(self._call("GET", "/url"))

    @property
    def html(self) -> str:
        return str(self._call("GET", "/source"))

    def text(self, selector: str) -> str:
        """Return the visible text of the first element that a CSS selector finds; wait for it while a page loads."""

        def found() -> list[str]:
            text = self.run("return document.querySelector(arguments[0])?.innerText ?? null", selector)
            return [] if text is None else [str(text)]

        return wait_until(found, message=f"there is {selector}")[0]

    def click(self, selector: str) -> None:
        """Click where the first element is: a page that updates itself may replace it at any moment."""
        place = self.run(_CENTER, selector)
        move = {"type": "pointerMove", "duration": 0, **place}
        self._act("pointer", [move, {"type": "pointerDown", "button": 0}, {"type": "pointerUp", "button": 0}])

    def press(self, key: str) -> None:
        """Press a key, given as its character in WebDriver."""
        self._act("key", [{"type": "keyDown", "value": key}, {"type": "keyUp", "value": key}])

    def accept_dialog(self) -> str:
        """Confirm the open dialog, and return its text."""
        text = str(self._call("GET", "/alert/text"))
        self._call("POST", "/alert/accept", {})
        return text

    def run(self, script: str, *arguments: Any) -> Any:
        """Return the result of a script, which may be a promise."""
        return self._call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def faint_texts(self) -> list[str]:
        """Return the elements whose text has too little contrast with its background."""
        found: list[str] = self.run(_FAINT_TEXTS)
        return found

    def resize(self, width: int, height: int) -> None:
        """Set the size of the page, which can be smaller than a window can be."""
        self._devtools(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )

    def prefer(self, scheme: str) -> None:
        """Set the preferred colour scheme: "light" or "dark"."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self._devtools("Emulation.setEmulatedMedia", features=[feature])

    def _act(self, device: str, actions: list[dict[str, Any]]) -> None:
        self._call("POST", "/actions", {"actions": [{"type": device, "id": device, "actions": actions}]})

    def _devtools(self, command: str, **parameters: Any) -> Any:
        return self._call("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        return _call(self._port, method, f"/session/{self._session}{path}", body)


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Run a browser with its profile in `folder`."""
    port = free_port()
    driver = subprocess.Popen(
        ["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=folder
    )
    try:
        wait_until(lambda: _is_ready(port), message="chromedriver answers")
        options = {"args": [*_OPTIONS, f"--user-data-dir={folder / 'profile'}"]}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "unhandledPromptBehavior": "ignore"}
        session = _call(port, "POST", "/session", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]
        try:
            yield Browser(port, session)
        finally:
            _call(port, "DELETE", f"/session/{session}")
    finally:
        driver.terminate()
        driver.wait(PATIENCE_S)


def _is_ready(port: int) -> bool:
    try:
        return bool(_call(port, "GET", "/status")["ready"])
    except OSError:
        return False


def _call(port: int, method: str, path: str, body: Any = None) -> Any:
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, None if body is None else json.dumps(body))
        value = json.loads(connection.getresponse().read())["value"]
    finally:
        connection.close()
    if isinstance(value, dict) and "error" in value:
        raise AssertionError(f"{method} {path}: {value['error']}: {value['message']}")
    return value
