"""Output of the command line: console, tables, formats of times and numbers, and reports of errors.

Text that goes to a terminal is escaped here: users, callers and other operators may have written it. Text for files and
pipes stays as it is. Imports little, because every command loads it.
"""

from __future__ import annotations

import codecs
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from cortex.errors import ConfigError, CortexError, UserError
from cortex.home import Home
from cortex.payloads.json_object import Json
from cortex.terminal import is_terminal, printable, shown, styled

#: Headers and rows.
Table = tuple[list[str], list[list[str]]]
#: Header, cell, and the text that hides the column if all of its cells are equal to it.
Column = tuple[str, Callable[[Json, datetime], str], str | None]

_STATUS_STYLES = {
    **dict.fromkeys(("live", "ready", "succeeded"), "green"),
    **dict.fromkeys(("updating", "starting", "enqueuing", "pending", "running"), "yellow"),
    **dict.fromkeys(("backing_off", "compute unavailable", "not running", "not answering"), "red"),
    **dict.fromkeys(("completed with failures", "failed while enqueuing", "worker error", "out of memory"), "red"),
    **dict.fromkeys(("timed out", "unexpected error"), "red"),
}
_CLEAR_LINE = "\r\x1b[K"
_CLEAR_SCREEN = "\x1b[H\x1b[2J\x1b[3J"
#: Width of the progress line if the width of the terminal is unknown.
_PROGRESS_WIDTH = 100
_MS_PER_S = 1000.0
_LOG_NAME = "cli.log"
_UTF8 = codecs.getincrementaldecoder("utf-8")


@dataclass
class Console:
    """Output streams: results go to standard output, everything else to standard error."""

    out: TextIO
    err: TextIO
    out_is_terminal: bool = False
    err_is_terminal: bool = False
    has_colors: bool = False
    _shows_progress: bool = field(default=False, init=False)
    _decoder: codecs.IncrementalDecoder = field(init=False, default_factory=lambda: _UTF8("replace"))

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Console:
        """Return the console of this process. Output to closed streams is discarded."""
        out = _usable(sys.stdout)
        err = _usable(sys.stderr)
        is_capable = environ.get("TERM") != "dumb"
        return cls(
            out,
            err,
            out_is_terminal=is_capable and out.isatty(),
            err_is_terminal=is_capable and err.isatty(),
            has_colors=is_capable and not environ.get("NO_COLOR"),
        )

    def line(self, text: str = "") -> None:
        """Write a line of the result."""
        self.clear_progress()
        self.out.write(_for(self.out, text) + "\n")

    def raw(self, data: bytes) -> None:
        """Write bytes of the result."""
        self.clear_progress()
        self.out.flush()
        if is_terminal(self.out):
            self.out.write(shown(self._decoder.decode(data)))
            self.out.flush()
            return
        self.out.buffer.write(data)
        self.out.buffer.flush()

    def note(self, text: str) -> None:
        """Write a line to standard error."""
        self.clear_progress()
        self.flush()
        self.err.write(_for(self.err, text) + "\n")
        self.err.flush()

    def ask(self, question: str) -> None:
        """Write a question, whose answer follows in the same line."""
        self.clear_progress()
        self.err.write(_for(self.err, question))
        self.err.flush()

    def error(self, text: str) -> None:
        """Write an error message."""
        self.note(f"{self.err_styled('error:', 'red', 'bold')} {text}")

    def json(self, data: Any) -> None:
        """Write indented JSON."""
        text = json.dumps(data, indent=2, ensure_ascii=False)
        if is_terminal(self.out) and shown(text) != text:
            text = json.dumps(data, indent=2)
        self.line(text)

    def table(self, headers: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Write a table. Cells that contain a status are coloured, and control characters are escaped."""
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
        """Show a progress line that later ones overwrite, on a terminal only."""
        if self.err_is_terminal:
            self._shows_progress = True
            self.err.write(_CLEAR_LINE + printable(text)[: _width(self.err)])
            self.err.flush()

    def begin(self, text: str) -> None:
        """Announce a step that may take seconds: with a progress line on a terminal, otherwise with a line."""
        if self.err_is_terminal:
            self.progress(text)
        else:
            self.note(text)

    def clear_progress(self) -> None:
        """Clear the progress line."""
        if self._shows_progress:
            self._shows_progress = False
            self.err.write(_CLEAR_LINE)
            self.err.flush()

    def clear_screen(self) -> None:
        """Clear the screen, on a terminal only."""
        if self.out_is_terminal:
            self.out.write(_CLEAR_SCREEN)

    def styled(self, text: str, *styles: str) -> str:
        """Return text with styles if standard output supports them."""
        return styled(text, *styles) if self.has_colors and self.out_is_terminal else text

    def err_styled(self, text: str, *styles: str) -> str:
        """Return text with styles if standard error supports them."""
        return styled(text, *styles) if self.has_colors and self.err_is_terminal else text

    def flush(self) -> None:
        """Flush standard output."""
        self.out.flush()

    def abandon(self) -> None:
        """Redirect streams that can't be written to the null device, so that the interpreter exits without an error."""
        null = os.open(os.devnull, os.O_WRONLY)
        for stream in (self.out, self.err):
            try:
                stream.flush()
            except OSError:
                os.dup2(null, stream.fileno())
        os.close(null)


def status_style(status: str) -> str | None:
    """Return the colour of a status; None for other text."""
    return "red" if status.startswith("error") else _STATUS_STYLES.get(status)


def _usable(stream: TextIO | None) -> TextIO:
    if stream is None:  # closed by the parent process
        return open(os.devnull, "w")  # noqa: SIM115, PTH123 - for as long as the process lives
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")
    return stream


def _width(stream: TextIO) -> int:
    """Return the maximum length of a progress line. A longer line would wrap and could not be cleared."""
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        columns = 0
    return columns - 1 if columns > 1 else _PROGRESS_WIDTH


def _joined(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "   ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def _for(stream: TextIO, text: str) -> str:
    return shown(text) if is_terminal(stream) else text


def build_table(columns: Iterable[Column], rows: list[Json], now: datetime) -> Table:
    """Return a table without its hidden columns."""
    shown = [
        (header, cells)
        for header, cell, hidden in columns
        if (cells := [cell(row, now) for row in rows]) and not (hidden is not None and set(cells) == {hidden})
    ]
    return [header for header, _ in shown], [[cells[index] for _, cells in shown] for index in range(len(rows))]


def format_age(moment: datetime, now: datetime) -> str:
    """Return the time since a moment in its largest unit: `5s`, `3m`, `2h`, `4d`."""
    seconds = max(0, int((now - moment).total_seconds()))
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


def format_duration(seconds: float) -> str:
    """Return a duration in its two largest units: `0.4s`, `12s`, `3m 5s`, `2h 0m`, `4d 7h`."""
    if seconds < 1:
        return f"{max(0.0, seconds):.1f}s"
    whole = int(seconds)
    for size, unit, smaller, smaller_unit in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= size:
            return f"{whole // size}{unit} {whole % size // smaller}{smaller_unit}"
    return f"{whole}s"


def format_average(average_ms: float | None) -> str:
    """Return an average time: `-`, `<1 ms`, `12 ms`, `1.5 s`."""
    if average_ms is None:
        return "-"
    if average_ms < 1:
        return "<1 ms"
    return f"{average_ms:.0f} ms" if average_ms < _MS_PER_S else f"{average_ms / _MS_PER_S:.1f} s"


def format_time(moment: datetime) -> str:
    """Return a time in UTC as tables show it."""
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC"


def format_number(number: float) -> str:
    """Return a number with two or three significant digits: `0.25`, `3.4`, `812`, `81k`, `1.3M`."""
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f}{unit}" if number < 10 * size else f"{number / size:.0f}{unit}"
    if number >= 10:
        return f"{number:.0f}"
    return f"{number:.1f}" if number >= 1 else f"{number:.2g}"


def format_count(number: int, singular: str, plural: str) -> str:
    """Return a number with its noun: `1 batch`, `2 batches`."""
    return f"{number:,} {singular if number == 1 else plural}"


def report_error(error: CortexError, console: Console) -> None:
    """Write an expected error to the console."""
    if isinstance(error, ConfigError):
        for diagnostic in error.diagnostics:
            console.note(str(diagnostic))
        console.error(f"{format_count(len(error.diagnostics), 'mistake', 'mistakes')} found")
        return
    if isinstance(error, UserError) and error.traceback:
        console.note(error.traceback.rstrip())
    console.error(str(error))


def report_bug(error: Exception, home: Home, console: Console, what: str = "internal error") -> None:
    """Write one line about an unexpected error to the console, and its traceback to `logs/cli.log`."""
    log = home.logs_dir / _LOG_NAME
    text = "".join(traceback.format_exception(error))
    try:
        log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        with os.fdopen(descriptor, "w") as stream:
            stream.write(f"{datetime.now(UTC).isoformat()}\n{text}\n")
        where = f"; {log} has the details"
    except OSError:
        where = ""
    words = " ".join(str(error).split())
    console.error(f"{what}: {type(error).__name__}{': ' + words if words else ''}{where}")


def located(error: ConfigError, folder: Path, config_name: str | None = None) -> ConfigError:
    """Return the error with file names relative to the working directory instead of the project's folder.

    With `config_name`, all diagnostics refer to that file, whatever name the operator gave it.
    """
    return ConfigError([replace(item, file=str(folder / (config_name or item.file))) for item in error.diagnostics])
