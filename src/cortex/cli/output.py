"""What the user sees: lines, tables, JSON, progress. Knows no command; standard library only, to start quickly."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

_STYLES = {"bold": "1", "red": "31", "green": "32", "yellow": "33", "dim": "2"}
_STATUS_STYLES = {
    **dict.fromkeys(("live", "ready", "succeeded"), "green"),
    **dict.fromkeys(("updating", "starting", "enqueuing", "pending", "running"), "yellow"),
    **dict.fromkeys(("backing_off", "compute unavailable", "not running"), "red"),
    **dict.fromkeys(("completed with failures", "failed while enqueuing", "worker error", "out of memory"), "red"),
    **dict.fromkeys(("timed out", "unexpected error"), "red"),
}
_CLEAR_LINE = "\r\x1b[K"
_CLEAR_SCREEN = "\x1b[H\x1b[2J\x1b[3J"
#: Of a progress line, where the terminal does not tell its own.
_PROGRESS_WIDTH = 100


@dataclass
class Console:
    """Standard output for what was asked, standard error for everything else."""

    out: TextIO
    err: TextIO
    out_is_terminal: bool = False
    err_is_terminal: bool = False
    has_colors: bool = False
    _shows_progress: bool = field(default=False, init=False)

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Console:
        """Return the console of this process; closed streams swallow what is written."""
        out = _usable(sys.stdout)
        err = _usable(sys.stderr)
        smart = environ.get("TERM") != "dumb"
        return cls(
            out,
            err,
            out_is_terminal=smart and out.isatty(),
            err_is_terminal=smart and err.isatty(),
            has_colors=smart and not environ.get("NO_COLOR"),
        )

    def line(self, text: str = "") -> None:
        """Write a line of what was asked for."""
        self.clear_progress()
        self.out.write(text + "\n")

    def raw(self, data: bytes) -> None:
        """Write bytes of what was asked for."""
        self.clear_progress()
        self.out.flush()
        self.out.buffer.write(data)
        self.out.buffer.flush()

    def note(self, text: str) -> None:
        """Write a line about what is being done."""
        self.clear_progress()
        self.flush()
        self.err.write(text + "\n")
        self.err.flush()

    def error(self, text: str) -> None:
        """Write what went wrong."""
        self.note(f"{self.err_styled('error:', 'red', 'bold')} {text}")

    def json(self, data: Any) -> None:
        """Write JSON: for readers on a terminal as for programs."""
        self.line(json.dumps(data, indent=2, ensure_ascii=False))

    def table(self, headers: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Write rows under their headers; a cell that is a status is coloured, and no cell says more than text."""
        rows = [[printable(str(cell)) for cell in row] for row in rows]
        widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
        self.line(self.styled(_joined(headers, widths), "bold"))
        for row in rows:
            padded = _joined(row, widths)
            for cell in row:
                if style := status_style(cell):
                    padded = padded.replace(cell, self.styled(cell, style), 1)
            self.line(padded)

    def progress(self, text: str) -> None:
        """Show what is being waited for, in place, on a terminal only."""
        if self.err_is_terminal:
            self._shows_progress = True
            self.err.write(_CLEAR_LINE + text[: _width(self.err)])
            self.err.flush()

    def clear_progress(self) -> None:
        """Take the progress line away."""
        if self._shows_progress:
            self._shows_progress = False
            self.err.write(_CLEAR_LINE)
            self.err.flush()

    def clear_screen(self) -> None:
        """Begin a new picture, on a terminal only."""
        if self.out_is_terminal:
            self.out.write(_CLEAR_SCREEN)

    def styled(self, text: str, *styles: str) -> str:
        """Return text in colour, where standard output shows it."""
        return _styled(text, styles) if self.has_colors and self.out_is_terminal else text

    def err_styled(self, text: str, *styles: str) -> str:
        """Return text in colour, where standard error shows it."""
        return _styled(text, styles) if self.has_colors and self.err_is_terminal else text

    def flush(self) -> None:
        """Write out what is buffered."""
        self.out.flush()

    def abandon(self) -> None:
        """Write no more to a stream that can't be written, of which the interpreter must not complain at its end."""
        null = os.open(os.devnull, os.O_WRONLY)
        for stream in (self.out, self.err):
            try:
                stream.flush()
            except OSError:
                os.dup2(null, stream.fileno())
        os.close(null)


def printable(text: str) -> str:
    """Return text that a terminal shows and does not obey: what can't be printed is escaped, line ends too."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def status_style(status: str) -> str | None:
    """Return the colour of a status; None for other words."""
    return "red" if status.startswith("error") else _STATUS_STYLES.get(status)


def _usable(stream: TextIO | None) -> TextIO:
    if stream is None:  # closed by the caller
        return open(os.devnull, "w")  # noqa: SIM115, PTH123 - for as long as the process lives
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")
    return stream


def _width(stream: TextIO) -> int:
    """Return how long a progress line may be: a longer one would wrap, and then could not be cleared."""
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        columns = 0
    return columns - 1 if columns > 1 else _PROGRESS_WIDTH


def _joined(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "   ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def _styled(text: str, styles: Sequence[str]) -> str:
    return f"\x1b[{';'.join(_STYLES[style] for style in styles)}m{text}\x1b[0m"
