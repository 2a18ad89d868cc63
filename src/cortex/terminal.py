"""Text for terminals: styles, and escapes of everything that could control them."""

from __future__ import annotations

import re
import sys
from typing import TextIO

_STYLES = {"bold": "1", "red": "31", "green": "32", "yellow": "33", "dim": "2"}
#: What stays: line ends, tabs, wide blanks, joiners of letters and emoji, and the colours and styles of logs, except 5,
#: 6 and 8, which blink and hide.
_BYTE = "[0-9]{1,3}"
_CODE = rf"(?:0?[0-479]|2[1-9]|[34][0-79]|9[0-7]|10[0-7]|[34]8;(?:5;{_BYTE}|2;{_BYTE};{_BYTE};{_BYTE}))"
_SGR = rf"\x1b\[(?:{_CODE}(?:;{_CODE})*)?m"
_HARMLESS = re.compile(rf"({_SGR}|[\n\t\u00a0\u2000-\u200d\u202f\u205f\u3000]+)")
_RESET = "\x1b[0m"


def styled(text: str, *styles: str) -> str:
    """Return text with styles: bold, dim, or the name of a colour."""
    return f"\x1b[{';'.join(_STYLES[style] for style in styles)}m{text}{_RESET}"


def printable(text: str) -> str:
    """Return text with control characters and line ends escaped, so that it can't control the terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shown(text: str) -> str:
    """Return text as terminals show it: lines and colours stay, other control and format characters are escaped."""
    if text.isprintable():
        return text
    parts = _HARMLESS.split(text)  # those with odd numbers match
    parts[::2] = map(printable, parts[::2])
    has_style = any(part.startswith("\x1b") for part in parts[1::2])
    is_open = has_style and not text.rstrip("\n").endswith(_RESET)
    return "".join(parts) + (_RESET if is_open else "")


def without_overwritten(line: str) -> str:
    """Return what a terminal shows of a line after its carriage returns, such as those of a progress bar.

    What is longer than its successors stays in part: a text of a caller hides no other.
    """
    result = ""
    for part in line.split("\r"):
        result = part + result[len(part) :]
    return result


def is_terminal(stream: TextIO | None) -> bool:
    """Return whether a stream leads to a terminal."""
    return stream is not None and stream.isatty()


def print_line(text: str, stream: TextIO | None = None) -> None:
    """Print text that others may have written to standard output, or to a stream."""
    stream = stream or sys.stdout
    print(shown(text) if is_terminal(stream) else text, file=stream, flush=True)
