"""The lines that `cortex dev` prints: never while a debugger has the terminal, and always complete."""

from __future__ import annotations

import contextlib
import difflib
import json
import sys
import time
from collections.abc import Callable

from cortex.dev.client_connection import ServedRequest
from cortex.terminal import shown, styled

_SHOWN_BODY_LINES = 40
_SHOWN_REASON_LINES = 10
_SHOWN_REASON = 500


class Terminal:
    """Standard error of `cortex dev`. Lines wait while a debugger reads from the terminal."""

    def __init__(self, has_colors: bool, write: Callable[[str], object] | None = None) -> None:
        self._has_colors = has_colors
        self._write = write or sys.stderr.write
        self._debuggers = 0
        self._waiting: list[str] = []

    def line(self, text: str) -> None:
        """Print a line with the time."""
        self.raw(f"{self.styled(time.strftime('%H:%M:%S'), 'dim')} {text}")

    def raw(self, text: str) -> None:
        """Print a line."""
        if self._debuggers:
            self._waiting.append(text)
            return
        self._write(f"{shown(text)}\n")  # a path or an error may be a client's text
        sys.stderr.flush()

    @property
    def is_debugging(self) -> bool:
        """Return whether a debugger has the terminal."""
        return self._debuggers > 0

    def set_debugging(self, is_active: bool) -> None:
        """Hold back lines while a debugger runs."""
        self._debuggers = max(0, self._debuggers + (1 if is_active else -1))
        if not self._debuggers:
            waiting, self._waiting = self._waiting, []
            for text in waiting:
                self.raw(text)

    def styled(self, text: str, *styles: str) -> str:
        """Return text with styles if the terminal has colours."""
        return styled(text, *styles) if self._has_colors else text

    def request(self, request: ServedRequest) -> None:
        """Print a request with its status and its time, and below it why it failed."""
        status = request.status
        color = "green" if status < 400 else "yellow" if status < 500 else "red"
        outcome = self.styled(str(status), color) if status else self.styled("closed", "yellow")
        name = f"{request.api}  " if request.api else ""
        self.line(f"{name}{request.method} {request.path} {outcome}  {format_ms(request.seconds)}")
        if request.reason:
            for line in request.reason.splitlines()[:_SHOWN_REASON_LINES]:
                self.raw(f"  {line[:_SHOWN_REASON]}")

    def difference(self, before: str, after: str) -> None:
        """Print how two responses differ."""
        lines = list(difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=2))[2:]
        for text in lines[:_SHOWN_BODY_LINES]:
            color = {"+": "green", "-": "red"}.get(text[:1])
            self.raw(f"  {self.styled(text, color) if color else text}")


def format_ms(seconds: float) -> str:
    """Return a duration: `3.1 ms`, `420 ms`, `2.4 s`."""
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1000:.0f} ms" if seconds >= 0.1 else f"{seconds * 1000:.1f} ms"


def format_body(status: int, content_type: str, body: bytes) -> str:
    """Return a response as lines, JSON with indentation, so that two can be compared."""
    text = body.decode(errors="replace")
    if "json" in content_type:
        with contextlib.suppress(ValueError):
            text = json.dumps(json.loads(body), indent=2, ensure_ascii=False)
    return f"{status}\n{text}"
