"""Split a stream of bytes into its JSON values: one per line, pretty-printed, or side by side.

Memory is bounded by one piece and one value. One value per line is the common case, and each line goes through orjson;
other values are delimited by their brackets. ijson would replace this, but it parses each value into Python objects,
while batches need the text of a value unchanged.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Sequence

import orjson

from cortex.errors import SubmissionError

_SPACE = re.compile(rb"[ \t\r\n]*+")
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
#: Up to the next bracket outside of strings.
_TO_BRACKET = re.compile(rb'(?:[^"\[\]{}]++|"[^"\\]*+(?:\\.[^"\\]*+)*+")*+[\[\]{}]', re.DOTALL)
_WORD = re.compile(rb'[^ \t\r\n"\[\]{},:]++')
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
#: First bytes of gzip, zip, Parquet and Zstandard files.
PACKED = (b"\x1f\x8b", b"PK\x03\x04", b"PAR1", b"\x28\xb5\x2f\xfd")
_SHOWN_BEFORE, _SHOWN_AFTER = 30, 50


class JsonStream:
    """Splits one file's content, given piece by piece, into values, each as JSON without line breaks."""

    def __init__(self, name: str, max_value_bytes: int) -> None:
        self._name = name
        self._max_value_bytes = max_value_bytes
        self._rest = b""
        self._position = 0  #: of `_rest` in the file
        #: Of the value at the beginning of `_rest`: number of open brackets, and the position up to which it counts.
        self._depth = 0
        self._counted = 0

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the values that end in this piece. Raises: SubmissionError with the position of invalid JSON."""
        data = self._rest + piece if self._rest else piece
        if not self._position:
            if BYTE_ORDER_MARK.startswith(data[:3]) and len(data) < 3:
                self._rest = data
                return []
            if data.startswith(BYTE_ORDER_MARK):
                data, self._position = data[3:], 3
        values: list[bytes] = []
        begin, is_in_doubt = 0, True
        if self._depth:
            begin = self._take(data, 0, values)
        if not self._depth and (cut := data.rfind(b"\n", begin)) >= 0:
            begin, is_in_doubt = self._take_lines(data, begin, cut, values)
        if not self._depth and (is_in_doubt or len(data) - begin > self._max_value_bytes):
            begin = self._take_all(data, begin, values)
        self._rest = data[begin:]
        self._position += begin
        if len(self._rest) > self._max_value_bytes:
            self._refuse_rest()
        return self._within_limit(values)

    def end(self) -> list[bytes]:
        """Return the last value if only the end of the file ends it. Raises: as `feed`."""
        data, values = self._rest, list[bytes]()
        begin = self._take_all(data, 0, values, is_last=True)
        self._rest = data[begin:]
        self._position += begin
        if self._rest:
            self._refuse_rest()
        return self._within_limit(values)

    def _within_limit(self, values: list[bytes]) -> list[bytes]:
        if values and max(map(len, values)) > self._max_value_bytes:
            large = next(value for value in values if len(value) > self._max_value_bytes)
            raise self._too_large(large, f"has {len(large):,} bytes")
        return values

    def _take_lines(self, data: bytes, begin: int, cut: int, values: list[bytes]) -> tuple[int, bool]:
        """Take lines while each is a value; return the position after them, and True if it is before `cut`.

        The first line of a value of several lines is not a value, so such values cannot be confused.
        """
        raw = data[begin:cut].split(b"\n")
        may_be_blank = b"\r" in data or b"\n\n" in data or not raw[0] or not raw[-1]
        lines = stripped(raw) if may_be_blank else raw
        taken = cut + 1
        try:
            deque(map(orjson.loads, lines), 0)
        except orjson.JSONDecodeError:
            good = count_good(raw)
            lines = stripped(raw[:good])
            taken = begin + sum(map(len, raw[:good])) + good
        values += map(on_one_line, lines) if b"\r" in data else lines
        return taken, taken <= cut

    def _take_all(self, data: bytes, begin: int, values: list[bytes], *, is_last: bool = False) -> int:
        """Take values until one is incomplete; return the position where it begins."""
        while True:
            begin = self._after_space(data, begin)
            if begin == len(data):
                return begin
            before = begin
            begin = self._take(data, begin, values, is_last=is_last)
            if begin == before:
                return begin

    def _take(self, data: bytes, begin: int, values: list[bytes], *, is_last: bool = False) -> int:
        """Take the value at `begin`; return the position after it, or `begin` if it is incomplete."""
        first = data[begin : begin + 1]
        if first in (b"{", b"["):
            end = self._end_of_container(data, begin)
        elif first == b'"':
            found = _STRING.match(data, begin)
            end = found.end() if found else None
        else:
            found = _WORD.match(data, begin)
            if not found:
                raise self._no_value(data, begin, "a value was expected here; separate values by line breaks")
            end = found.end() if found.end() < len(data) or is_last else None
        if end is None:
            return begin
        value = data[begin:end]
        try:
            orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise self._no_value(data, begin + _byte_position(value, error), reason(error)) from None
        values.append(on_one_line(value))
        return end

    def _end_of_container(self, data: bytes, begin: int) -> int | None:
        depth, position = (self._depth, self._counted) if self._depth else (0, begin)
        match = _TO_BRACKET.match
        while found := match(data, position):
            position = found.end()
            if data[position - 1] in b"[{":
                depth += 1
            else:
                depth -= 1
                if not depth:
                    self._depth = self._counted = 0
                    return position
        self._depth, self._counted = depth, position - begin
        return None

    @staticmethod
    def _after_space(data: bytes, begin: int) -> int:
        found = _SPACE.match(data, begin)
        return found.end() if found else begin

    def _refuse_rest(self) -> None:
        """Raise the error for a value that is too long or incomplete."""
        rest = self._rest
        try:
            orjson.loads(rest)
        except orjson.JSONDecodeError as error:
            position = _byte_position(rest, error)
            # An error at the very end only means that the value is incomplete.
            if position < len(rest) - 4:
                raise self._no_value(rest, position, reason(error), self._position) from None
        if len(rest) <= self._max_value_bytes:
            raise self._no_value(rest, 0, "the file ends before this value does", self._position)
        raise self._too_large(rest, f"at byte {self._position:,} has at least {len(rest):,} bytes")

    def _too_large(self, value: bytes, size: str) -> SubmissionError:
        fix = "reduce its size, or raise networking.max_batch_size of the API"
        if value[:1] == b"[":
            fix = "write the items one after another, not as one list; or raise networking.max_batch_size of the API"
        limit = f"which exceeds the limit ({self._max_value_bytes} bytes)"
        return SubmissionError(f"{self._name}: the value {size} ({shown(value, 0)}), {limit}; {fix}")

    def _no_value(self, data: bytes, position: int, reason: str, start: int | None = None) -> SubmissionError:
        where = (self._position if start is None else start) + position
        if not self._position and data.startswith(PACKED):
            reason = "the file is compressed or binary; store it as plain JSON"
        return SubmissionError(f"{self._name}: invalid JSON at byte {where:,} ({shown(data, position)}): {reason}")


def stripped(lines: Iterable[bytes]) -> list[bytes]:
    """Return the lines that aren't blank, without surrounding whitespace."""
    return list(filter(None, map(bytes.strip, lines)))


def count_good(lines: Sequence[bytes]) -> int:
    """Count the lines before the first that is neither blank nor JSON."""
    for count, line in enumerate(lines):
        try:
            orjson.loads(line)
        except orjson.JSONDecodeError:
            if line.strip():
                return count
    return len(lines)


def on_one_line(value: bytes) -> bytes:
    """Return a valid JSON value without line breaks, which never occur inside its strings."""
    if b"\n" in value:
        value = b"".join(map(bytes.strip, value.split(b"\n")))
    return value.replace(b"\r", b" ")


def _byte_position(value: bytes, error: orjson.JSONDecodeError) -> int:
    try:
        return len(value.decode()[: error.pos].encode())
    except UnicodeDecodeError as wrong:
        return wrong.start


def reason(error: orjson.JSONDecodeError) -> str:
    """Return the reason why something is not JSON."""
    text = error.msg.partition(": line ")[0]
    return "it is no UTF-8" if "UTF-8" in text else text


def shown(data: bytes, position: int) -> str:
    """Return the text around a position, on one line."""
    begin, end = max(position - _SHOWN_BEFORE, 0), position + _SHOWN_AFTER
    text = data[begin:end].decode(errors="replace")
    plain = "".join(letter if letter.isprintable() else " " for letter in text)
    return f"{'…' if begin else ''}{plain}{'…' if end < len(data) else ''}"
